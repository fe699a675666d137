"""Stores below host memory: their interface, and the format of records."""

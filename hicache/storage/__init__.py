"""Stores below host memory: their interface, their guard, and the format of records."""

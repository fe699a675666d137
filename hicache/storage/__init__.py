"""Stores below host memory: their interface, and their guard."""

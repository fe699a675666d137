"""Stores below host memory: their interface, their guard, and faults that are injected."""

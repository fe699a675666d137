"""Faults on purpose, to test what guards the cache."""

"""Eviction policies of the host pool."""

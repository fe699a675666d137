"""Stores below host memory: their interface, the format of records, and the ``file`` store."""

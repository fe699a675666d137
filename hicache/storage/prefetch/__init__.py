"""Reads from storage while a request waits for its turn."""

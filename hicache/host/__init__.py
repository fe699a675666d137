"""The host memory: the pool, which page is in which slot, and which page leaves."""

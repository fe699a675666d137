"""The host memory: the pool, the index of its slots, and the eviction of pages."""

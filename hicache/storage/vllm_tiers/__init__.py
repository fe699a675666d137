"""vLLM's secondary tiers as a storage backend."""

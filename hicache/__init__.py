"""Host KV cache: planned."""

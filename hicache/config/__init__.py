"""The configuration of the host KV cache."""

"""The Triton kernels that change logits by a row's history: what was emitted, then its own path."""

"""Prompts in chunks that fit a CUDA graph, where launching all rows at once takes longer."""

"""Steps with prompts that fit a CUDA graph: prompts in chunks, and trees beside them cut."""

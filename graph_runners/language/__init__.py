"""CUDA graphs of the language model: the draft's passes, mixed batches, decode widths."""

"""One case for each Triton kernel, to compile it without a GPU."""

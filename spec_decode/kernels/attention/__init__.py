"""The Triton kernels of tree attention."""

"""Slow, plain counterparts of the kernels."""

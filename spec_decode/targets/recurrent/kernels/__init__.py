"""Triton kernels of recurrent layers, whose rows continue the state of their parents."""

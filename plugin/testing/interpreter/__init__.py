"""Triton's interpreter on a CPU, with its known defects mended."""

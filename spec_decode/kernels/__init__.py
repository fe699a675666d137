"""The Triton kernels that draft, verify and compact trees, one job per file."""

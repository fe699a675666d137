"""Storage below host memory."""

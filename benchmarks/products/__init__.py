"""A probe of products whose weights are loaded while the kernel before still runs."""

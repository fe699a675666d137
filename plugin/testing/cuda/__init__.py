"""Stand-ins for CUDA graphs and streams."""

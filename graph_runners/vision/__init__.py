"""CUDA graphs of vision encoders."""

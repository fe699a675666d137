"""CUDA graphs of what vLLM runs without one."""

"""Grafts of trees onto the layers of Kimi Linear, which vLLM has apart from other models'."""

"""Adapters of models that do not speak vLLM's encoder protocol, one family a file."""

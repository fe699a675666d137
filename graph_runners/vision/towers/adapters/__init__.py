"""Adapters of models that do not speak vLLM's encoder protocol, one file per family."""

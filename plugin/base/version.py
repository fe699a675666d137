"""Our version: vLLM's minor version that it was written for first, and a number of ours."""

__version__ = "0.32.0a1"

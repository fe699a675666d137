"""Benchmark of host KV-cache connectors: ours, vLLM's own, and none, on one machine in one run."""

"""Benchmark host KV-cache connectors in one run on one machine: ours, vLLM's own, and none."""

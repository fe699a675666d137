"""``vllm-graft train``: an EAGLE-3 head for a target that vLLM serves, learned from its answers."""

"""``vllm-graft plan``: what ``vllm serve`` would run with the same flags, before anything loads."""

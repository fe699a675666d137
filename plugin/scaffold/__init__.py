"""``vllm-graft new-plugin``: a distribution of one's own, with a hook, its tests and a readme."""

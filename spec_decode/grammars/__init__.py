"""Structured output at full tree: a grammar masks each node's logits along the node's own path."""

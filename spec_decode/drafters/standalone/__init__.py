"""Standalone draft models, which have K/V of their own: chains and trees of them."""

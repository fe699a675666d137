"""Drafters that draft all depths of a tree in one pass over a block of positions."""

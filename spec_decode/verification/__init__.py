"""Verification of trees: the draws, the walk, and the state that the parts of a step share."""

"""Sizes of trees: their shapes, the batches that draft them, and the lessons of serving."""

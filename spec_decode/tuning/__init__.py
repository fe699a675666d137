"""How large trees are: their shapes, the batches that draft them, and what serving teaches."""

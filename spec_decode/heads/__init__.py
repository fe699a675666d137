"""The draft's output head: its best tokens, in full, from hot tokens, or in FP8."""

"""The benchmark of tree drafting."""

"""A vision block's small operators as fewer kernels, with the bits of the operators themselves."""

PART = "fused"
"""Of the ledger."""

UNKNOWN_BLOCKS = "the tower has no blocks that we know"
"""Why nothing of most towers is fused."""

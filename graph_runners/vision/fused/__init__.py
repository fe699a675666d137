"""Vision blocks whose small operators are fused into fewer kernels, with the same bits."""

UNKNOWN_BLOCKS = "the tower has no blocks that we know"
"""Why most towers have no fused blocks."""

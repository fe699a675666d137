"""The shape of a draft tree: how wide, how deep and how large it may become."""

from __future__ import annotations

from dataclasses import dataclass


def num_candidates(topk: int, steps: int) -> int:
    """Candidates after ``steps`` levels: ``topk`` at level 0, ``topk ** 2`` at each later one."""
    return topk + (steps - 1) * topk * topk


MAX_NODES = 63
"""Bits of an int64 ancestor mask that are left beside the root's."""


@dataclass(frozen=True)
class TreeShape:
    """Bounds of a draft tree.

    Attributes:
        topk: children drafted per node, and nodes per level that get children.
        steps: levels below the root; the draft runs ``steps - 1`` times after its extend pass.
        num_nodes: drafted nodes that are kept for verification, not counting the root.
    """

    topk: int
    steps: int
    num_nodes: int

    @property
    def num_candidates(self) -> int:
        """Nodes that drafting scores, of which `num_nodes` are kept (EAGLE-2, section 4.2)."""
        return num_candidates(self.topk, self.steps)

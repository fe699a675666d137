"""Tokens that trees yield, with one head and with the next."""

from __future__ import annotations

import math
from collections import deque

PARTS = 10
"""Parts of a window. It is looked at once per part."""

MARGIN = 0.03
"""Share of the tokens per tree that a head may yield less over a whole window: texts differ."""


class Yields:
    """Trees and the tokens that they yielded, by their number of nodes, which follows the batch:
    with more requests trees are smaller, whatever the head."""

    def __init__(self) -> None:
        self.by_nodes: dict[int, tuple[int, int]] = {}

    def add(self, nodes: int, trees: int, tokens: int) -> None:
        before = self.by_nodes.get(nodes, (0, 0))
        self.by_nodes[nodes] = before[0] + trees, before[1] + tokens

    def take(self, others: Yields) -> None:
        """Add others to these."""
        for nodes, counts in others.by_nodes.items():
            self.add(nodes, *counts)

    @property
    def trees(self) -> int:
        return sum(trees for trees, _ in self.by_nodes.values())

    @property
    def mean(self) -> float:
        """Tokens per tree; 0 without a tree."""
        return sum(tokens for _, tokens in self.by_nodes.values()) / max(1, self.trees)

    def over(self, before: Yields) -> float:
        """Its tokens over those that as many trees of the same sizes yielded before."""
        expected = tokens = 0.0
        for nodes, (trees, yielded) in self.by_nodes.items():
            old_trees, old_tokens = before.by_nodes.get(nodes, (0, 0))
            expected += trees * (old_tokens / old_trees if old_trees else before.mean)
            tokens += yielded
        return tokens / expected if expected else 1.0


class Window:
    """The yields of the last trees, `size` of them or a part more, or of all since a moment."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: deque[Yields] = deque([Yields()], maxlen=PARTS + 1)

    def add(self, step: Yields) -> None:
        """Add a step's trees."""
        if self._parts[-1].trees * PARTS >= self.size:
            self._parts.append(Yields())
        self._parts[-1].take(step)

    @property
    def sum(self) -> Yields:
        found = Yields()
        for part in self._parts:
            found.take(part)
        return found


def is_worse(after: Yields, before: Yields, size: int) -> bool | None:
    """Whether a head yields less than the one before it; None as long as nobody can say. Few trees
    say it of much less only: the mean of a quarter of them varies twice as much."""
    if after.trees * PARTS < size:
        return None
    part = min(1.0, after.trees / size)
    if after.over(before) < 1 - MARGIN / math.sqrt(part):
        return True
    return False if part == 1 else None

"""What trees of each number of nodes yield, learned from those that were verified."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MEMORY = 3000.0
"""Steps after which what was seen counts for 1/e."""

PRIOR = 8.0
"""Trees that the guess from other numbers of nodes counts for, and trees kept when texts change."""

_RECENT = 256.0
"""Verified trees over which a change of the text is looked for."""

_WIDTH = 2.0
"""Standard errors from the mean to its upper bound."""

_CHANGE = 4.0
"""Standard errors that recent trees are away from the mean when the text has changed."""


@dataclass
class _Seen:
    """Trees that were verified, and the drafts of them that were accepted; older ones count less.

    `expected` is what was expected to be accepted, where changes are looked for.
    """

    trees: float = 0.0
    accepted: float = 0.0
    expected: float = 0.0

    def fade(self, factor: float) -> None:
        """Count everything so far `factor` times."""
        self.trees *= factor
        self.accepted *= factor
        self.expected *= factor

    @property
    def mean(self) -> float:
        """Accepted drafts a tree."""
        return self.accepted / self.trees


class Acceptance:
    """Accepted drafts a tree, by number of nodes: means with upper bounds.

    Numbers that were seen little are guessed from their neighbours, so that hopeless ones need
    no trial. If the trees of the number in use begin to yield something else than they did, the
    text has changed: all means are scaled by it, and nearly forgotten.

    Args:
        numbers: of nodes; 0 yields nothing and is left out.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._seen = {nodes: _Seen() for nodes in numbers if nodes}
        self._recent = _Seen()

    def observe(self, nodes: int, emitted: Sequence[int]) -> None:
        """Take in the tokens that each tree of a step emitted, its bonus token included."""
        for each in self._seen.values():
            each.fade(math.exp(-1 / MEMORY))
        if not nodes:
            return
        trees, accepted = len(emitted), sum(emitted) - len(emitted)
        self._notice_change(nodes, trees, accepted)
        self._seen[nodes].trees += trees
        self._seen[nodes].accepted += accepted

    def upper(self, nodes: int) -> float:
        """Drafts that a tree may have accepted; more where little was seen."""
        if not nodes:
            return 0.0
        seen = self._seen[nodes]
        guess = self._guess(nodes)
        mean = (seen.accepted + PRIOR * guess) / (seen.trees + PRIOR)
        error = math.sqrt(_variance(mean) / (seen.trees + PRIOR))
        return min(float(nodes), mean + _WIDTH * error)

    def length(self, nodes: int) -> float:
        """Mean acceptance length that was seen, bonus token included; 0 if none was."""
        if not nodes:
            return 1.0
        return 1.0 + self._seen[nodes].mean if self._seen[nodes].trees else 0.0

    def _guess(self, nodes: int) -> float:
        """By the logarithm of the nodes between those seen; beyond them as much as may be hoped."""
        known = {n: seen.mean for n, seen in self._seen.items() if seen.trees and n != nodes}
        below = max((n for n in known if n < nodes), default=0)
        above = min((n for n in known if n > nodes), default=0)
        if below and above:
            share = math.log((1 + nodes) / (1 + below)) / math.log((1 + above) / (1 + below))
            return known[below] + share * (known[above] - known[below])
        if below:
            return known[below] * math.log(1 + nodes) / math.log(1 + below)
        if above:
            return min(known[above], float(nodes))
        return self._seen[nodes].mean if self._seen[nodes].trees else float(nodes)

    def _notice_change(self, nodes: int, trees: int, accepted: int) -> None:
        self._recent.fade(math.exp(-trees / _RECENT))
        if self._seen[nodes].trees <= PRIOR:
            return
        mean, recent = self._seen[nodes].mean, self._recent
        recent.trees += trees
        recent.accepted += accepted
        recent.expected += trees * mean
        error = math.sqrt(_variance(mean) * recent.trees)
        if recent.trees < _RECENT / 8 or abs(recent.accepted - recent.expected) < _CHANGE * error:
            return
        scale = (recent.accepted + 1) / (recent.expected + 1)
        for seen in self._seen.values():
            if seen.trees:
                kept = min(seen.trees, PRIOR)
                seen.accepted, seen.trees = scale * seen.mean * kept, kept
        self._recent = _Seen()


def _variance(mean: float) -> float:
    """Of the accepted drafts of a tree: that of a geometric distribution, never quite none."""
    return max(mean, 0.05) * (1 + mean)

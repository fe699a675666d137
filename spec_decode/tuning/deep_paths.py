"""Accepted paths that were deeper than the draft's levels: n-grams put their nodes there."""

from __future__ import annotations

from collections.abc import Sequence


class DeepPaths:
    """How long such paths are, older trees counting less.

    A tree's levels are as many as the draft has passes; only a copy of the request's own text goes
    deeper. A copy costs no pass and is one branch, so what trees of one shape copied tells what
    those of another would have: as much of it as they have nodes for.
    """

    def __init__(self) -> None:
        self._trees = 0.0
        self._paths: dict[int, float] = {}

    def fade(self, factor: float) -> None:
        """Let what was seen count for less."""
        self._trees *= factor
        # What is left of a path that nobody has followed for long is dropped.
        faded = {length: factor * weight for length, weight in self._paths.items()}
        self._paths = {length: weight for length, weight in faded.items() if weight > 1e-3}

    def observe(self, accepted: Sequence[int], levels: int) -> None:
        """Add trees of one step.

        Args:
            accepted: accepted drafts of each tree.
            levels: levels of their shape.
        """
        self._trees += len(accepted)
        for length in accepted:
            if length > levels:
                self._paths[length] = self._paths.get(length, 0.0) + 1.0

    def beyond(self, nodes: int, levels: int) -> float:
        """Mean accepted drafts per tree below the levels of a shape with so many nodes."""
        if not self._paths:
            return 0.0
        deeper = (max(0, min(each, nodes) - levels) * w for each, w in self._paths.items())
        return sum(deeper) / self._trees

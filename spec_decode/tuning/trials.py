"""Trials of another number of nodes, which tell whether measured costs are wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

COMPARED = 0.06
"""Spread of timed numbers of nodes (see `Slope`) from which costs count as compared.

One block of a number half as large as the one in use reaches it."""

FIRST = 4
"""Choices before the first trial; then it takes twice as many each time. The first steps of a batch
size are not timed (see `STEADY`)."""

NEAR = 0.15
"""The most that a number may seem worse than the best one.

Where measured costs hide what a node costs, 7 nodes seem 10 to 15 % worse than 15 in the simulated
mixture of experts, and are better."""


@dataclass
class _Count:
    choices: int = 0
    due: int = FIRST
    """At how many choices the next trial is made."""


@dataclass
class Trials:
    """When to try the second best number of nodes instead of the best one, by batch size.

    Where times of one number only are known, nothing tells whether the costs measured at the start
    are wrong about the others.
    """

    _counts: dict[int, _Count] = field(default_factory=dict)

    def rival(self, size: int, scores: Mapping[int, float], spread: float) -> int | None:
        """Count a choice; return the number to try in place of the best one, or None.

        Args:
            size: the batch size.
            scores: how good each number seems.
            spread: how far apart the timed numbers are, see `Slope`.
        """
        count = self._counts.setdefault(size, _Count())
        count.choices += 1
        if count.choices < count.due or spread >= COMPARED:
            return None
        best, *others = sorted(scores, key=scores.__getitem__, reverse=True)
        if not others or scores[others[0]] < (1 - NEAR) * scores[best]:
            return None
        count.due = 2 * count.choices
        return others[0]

"""What trees of each number of nodes yield, learned from those that were verified."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH_GAIN = 0.27
"""With m nodes a level, a level is missed m ** -0.27 times as often as by a chain.

Fitted to trees of 2 to 63 nodes on 3 to 13 levels, at temperature 0, 0.6 and 1: one exponent
serves the three texts within 3 % of the acceptance length (docs/benchmarks.md)."""

FIRST_MISS = 0.3
"""Chance to miss a level of a chain, before anything was seen."""

TEXT = 150.0
"""Steps after which what was seen of the text counts for 1/e."""

TEXT_TREES = 600.0
"""Verified trees after which it does: a large batch tells more of it in a step."""

RECENT = 48.0
"""Verified trees over which a change of the text is looked for."""

CHANGE = 3.5
"""Standard errors that recent trees are off when the text has changed.

Requests differ by far more than chance does, so what is right of late is better than what was right
on average; but a single one's hard lines are no other text. With a text for each temperature this
served the lab pair's own texts better than 2.5 (docs/benchmarks.md), and 5 is too slow to see that
a batch's text got a third easier."""

MEMORY = 2000.0
"""Steps after which what was seen of one number of nodes counts for 1/e."""

PAIRED = 12
"""Steps after a change of the number that are compared with those just before it."""

_LEVELS = 8.0
"""Levels that `FIRST_MISS` counts for, or what another temperature's text says."""

HEATS = (0.0, 0.4, 0.8)
"""Upper ends of the temperatures whose texts are alike; there is one class above."""

_MISSES = 100.0
"""Missed levels that `WIDTH_GAIN` counts for against those of one number of nodes."""


@dataclass
class _Text:
    """How often a chain's level would have been missed: misses, over levels tried."""

    misses: float = 0.0
    levels: float = 0.0

    def fade(self, factor: float) -> None:
        self.misses *= factor
        self.levels *= factor


@dataclass
class _Seen:
    """Verified trees of one number of nodes.

    Attributes:
        trees: how many.
        accepted: their accepted drafts.
        missed: levels that they missed.
        misses: of these, those just after a change of the number.
        expected: levels that these should have missed, by width and by the text just before.
    """

    trees: float = 0.0
    accepted: float = 0.0
    missed: float = 0.0
    misses: float = 0.0
    expected: float = 0.0

    def fade(self, factor: float) -> None:
        self.trees *= factor
        self.accepted *= factor
        self.missed *= factor
        self.misses *= factor
        self.expected *= factor

    @property
    def own(self) -> float:
        """How much oftener a level is missed than text and width say."""
        return (self.misses + _MISSES) / (self.expected + _MISSES)

    @property
    def doubt(self) -> float:
        """Relative error of what is expected to be missed, if misses are of Poisson."""
        return 1 / math.sqrt(self.missed + _MISSES)


class Acceptance:
    """Accepted drafts a tree, by number of nodes.

    A tree ends at the level that it misses. A text is described by one parameter, the chance that a
    chain misses a level; with N nodes on d levels it is missed ``(N / d) ** -WIDTH_GAIN`` times as
    often. So each verified tree tells of all numbers of nodes. How far a number is off that rule is
    learned when it comes into use, against the number before it: then both had the same text. Texts
    change: the chance forgets quickly, and at once where recent trees say something else. Those of
    other temperatures are other texts, of which each is remembered: a chain misses a level three
    times as often at temperature 1 as greedily.

    Args:
        levels: of the trees of each number of nodes; 0 nodes yield nothing and are left out.
    """

    def __init__(self, levels: Mapping[int, int]) -> None:
        self._levels = {nodes: min(count, nodes) for nodes, count in levels.items() if nodes}
        self._seen = {nodes: _Seen() for nodes in self._levels}
        self._heat = 0
        self._texts = {self._heat: _Text(FIRST_MISS * _LEVELS, _LEVELS)}
        self._recent = _Text()
        self._before = _Text()
        self._last = 0
        self._trees = 0
        self._paired = 0

    def observe(
        self,
        nodes: int,
        emitted: Sequence[int],
        *,
        alike: bool = True,
        same: bool = True,
        heat: float = 0.0,
    ) -> None:
        """Take in the tokens that each tree of a step emitted, its bonus token included.

        `alike` is whether the batch is about that of the step before, `same` whether most of its
        requests are: if not, its text is another. `heat` is their temperature on average.
        """
        self._turn_to(bisect_left(HEATS, heat))
        factor = math.exp(-1 / MEMORY)
        for each in self._seen.values():
            each.fade(factor)
        if self._text.levels > 1:  # Or nothing would be left after long without drafts.
            trees = len(emitted) if nodes else 0
            self._text.fade(math.exp(-max(1 / TEXT, trees / TEXT_TREES)))
        if not nodes or not emitted:
            return
        if not same or not self._trees / 2 <= len(emitted) <= self._trees * 2:
            # Other requests, so maybe another text: no ground to compare numbers on.
            self._recent = _Text()
            alike = False
        self._trees = len(emitted)
        depth, seen = self._levels[nodes], self._seen[nodes]
        accepted = [min(count - 1, depth) for count in emitted]
        misses = sum(count < depth for count in accepted)
        levels = (sum(accepted) + misses) * self._gain(nodes)
        self._compare(nodes, misses, levels, alike)
        self._learn(misses, levels * seen.own, len(accepted))
        seen.trees += len(accepted)
        seen.accepted += sum(accepted)
        seen.missed += misses

    def _turn_to(self, heat: int) -> None:
        """Go on with the text of a class of temperatures."""
        if heat == self._heat:
            return
        self._texts.setdefault(heat, _Text(self.miss * _LEVELS, _LEVELS))
        self._heat = heat
        # Nothing to compare numbers with, either.
        self._recent, self._paired = _Text(), 0

    def upper(self, nodes: int) -> float:
        """Drafts that a tree may have accepted: if it misses as little as may be."""
        if not nodes:
            return 0.0
        seen = self._seen[nodes]
        return self._accepted(nodes, self.miss * self._gain(nodes) * seen.own * (1 - seen.doubt))

    def length(self, nodes: int) -> float:
        """Mean acceptance length that was seen, bonus token included; 0 if none was."""
        if not nodes:
            return 1.0
        seen = self._seen[nodes]
        return 1.0 + seen.accepted / seen.trees if seen.trees else 0.0

    @property
    def _text(self) -> _Text:
        """That of the requests at hand."""
        return self._texts[self._heat]

    @property
    def miss(self) -> float:
        """Chance that a chain misses a level."""
        return self._text.misses / self._text.levels

    def _gain(self, nodes: int) -> float:
        return float((nodes / self._levels[nodes]) ** -WIDTH_GAIN)

    def _accepted(self, nodes: int, miss: float) -> float:
        hit = 1 - min(max(miss, 0.001), 1.0)
        return hit * (1 - hit ** self._levels[nodes]) / (1 - hit)

    def _compare(self, nodes: int, misses: float, levels: float, alike: bool) -> None:
        if nodes != self._last:
            self._before = _Text(self._recent.misses, self._recent.levels)
            self._last, self._paired = nodes, PAIRED
        if not alike:
            self._paired = 0
        before = self._before
        if self._paired and before.misses > 1:
            seen, expected = self._seen[nodes], levels * before.misses / before.levels
            # Both sides of the comparison are drawn: of few trees before, many after prove little.
            weight = before.misses / (before.misses + PAIRED * expected)
            seen.misses += weight * misses
            seen.expected += weight * expected
            self._paired -= 1

    def _learn(self, misses: float, levels: float, trees: int) -> None:
        self._text.misses += misses
        self._text.levels += levels
        recent = self._recent
        recent.fade(math.exp(-trees / RECENT))
        recent.misses += misses
        recent.levels += levels
        expected = recent.levels * self.miss
        # As if of Poisson; a single request's few levels prove nothing.
        error = math.sqrt(expected)
        if recent.levels > RECENT / 2 and abs(recent.misses - expected) > CHANGE * error:
            self._texts[self._heat] = _Text(recent.misses + 1, recent.levels + 1)

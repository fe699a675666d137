"""Accepted drafts of trees by number of nodes, learned from verified trees."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH_GAIN = 0.27
"""With m nodes per level, a tree misses a level m ** -0.27 times as often as a chain does. Measured
on trees of 2 to 63 nodes on 3 to 13 levels, greedy and sampled."""

FIRST_MISS = 0.3
"""Chance that a chain misses a level, before anything was seen."""

TEXT_STEPS = 150.0
"""Steps after which what was seen of a text counts for 1/e."""

TEXT_TREES = 600.0
"""Verified trees after which it counts for 1/e: a large batch tells more of a text per step."""

RECENT = 48.0
"""Verified trees over which a change of the text is looked for."""

CHANGE = 3.5
"""Standard errors by which recent trees must differ from a text to count as another text. Requests
differ by more than chance: a smaller number takes their unlucky levels for a change."""

MEMORY = 2000.0
"""Steps after which what was seen of one number of nodes counts for 1/e."""

PAIRED = 12
"""Steps after a change of the number of nodes that are compared with those just before it."""

TEMPERATURES = (0.0, 0.4, 0.8)
"""Upper ends of the classes of temperatures whose texts are alike; one more class lies above."""

_PRIOR_LEVELS = 8.0
"""Levels that `FIRST_MISS` counts for, or what was seen at another temperature."""

_PRIOR_MISSES = 100.0
"""Missed levels that the rule of `WIDTH_GAIN` counts for, against those of one number of nodes."""


@dataclass
class _MissRate:
    """Missed and tried levels, older ones counting less: how often a chain misses one. A level of a
    wide tree counts for less than one of a chain."""

    misses: float = 0.0
    levels: float = 0.0

    def fade(self, factor: float) -> None:
        self.misses *= factor
        self.levels *= factor


@dataclass
class _Record:
    """Verified trees of one number of nodes, older ones counting less. The paired ones are missed
    levels in the first steps after a change to this number, and those that the rule of `WIDTH_GAIN`
    expects from the text of the steps before the change."""

    missed: float = 0.0
    paired_misses: float = 0.0
    paired_expected: float = 0.0
    step: int = 0

    def fade_to(self, step: int) -> None:
        """Count less by the steps since the last call."""
        if step == self.step:
            return
        factor, self.step = math.exp((self.step - step) / MEMORY), step
        self.missed *= factor
        self.paired_misses *= factor
        self.paired_expected *= factor

    @property
    def own(self) -> float:
        """Missed levels over those that text and rule expect."""
        return (self.paired_misses + _PRIOR_MISSES) / (self.paired_expected + _PRIOR_MISSES)

    @property
    def doubt(self) -> float:
        """Relative standard error of the expected misses, if they are Poisson-distributed."""
        return 1 / math.sqrt(self.missed + _PRIOR_MISSES)


class _DeepPaths:
    """Accepted paths that were deeper than the draft's levels, older trees counting less. Only a
    copy of the request's own text goes so deep. A copy costs no pass and is one branch, so trees of
    another shape would have copied as much of it as they have nodes for."""

    def __init__(self) -> None:
        self._trees = 0.0
        self._paths: dict[int, float] = {}

    def fade(self, factor: float) -> None:
        self._trees *= factor
        if not self._paths:
            return
        # What is left of a path that nobody has followed for long is dropped.
        faded = {length: factor * weight for length, weight in self._paths.items()}
        self._paths = {length: weight for length, weight in faded.items() if weight > 1e-3}

    def observe(self, emitted: Sequence[int], levels: int) -> None:
        self._trees += len(emitted)
        for length in [count - 1 for count in emitted if count - 1 > levels]:
            self._paths[length] = self._paths.get(length, 0.0) + 1.0

    def beyond(self, nodes: int, levels: int) -> float:
        """Mean accepted drafts per tree below the levels of a shape with so many nodes."""
        if not self._paths:
            return 0.0
        deeper = (max(0, min(each, nodes) - levels) * w for each, w in self._paths.items())
        return sum(deeper) / self._trees


class Acceptance:
    """Accepted drafts per tree, by number of nodes, where trees of a number have so many `levels`.

    One number describes a text: the chance that a chain misses a level. A path ends at the first
    missed level, and a tree of N nodes on d levels misses one ``(N / d) ** -WIDTH_GAIN`` times as
    often, so each tree tells about all numbers of nodes. How far a number is off this rule is
    learned when it comes into use, by comparison with the number before it on the same text.

    Texts change: the chance is forgotten quickly, and replaced at once where recent trees
    contradict it. Each class of temperatures has a chance of its own. Paths below the levels, which
    n-grams continue, are averaged apart and say nothing of it."""

    def __init__(self, levels: Mapping[int, int]) -> None:
        self._levels = {nodes: min(count, nodes) for nodes, count in levels.items() if nodes}
        # Misses of a tree's level over those of a chain's, by the rule of `WIDTH_GAIN`.
        self._gains = {n: float((n / depth) ** -WIDTH_GAIN) for n, depth in self._levels.items()}
        self._seen = {nodes: _Record() for nodes in self._levels}
        self._class = 0
        self._deep = {self._class: _DeepPaths()}
        self._texts = {self._class: _MissRate(FIRST_MISS * _PRIOR_LEVELS, _PRIOR_LEVELS)}
        self._recent = _MissRate()
        self._before = _MissRate()
        self._steps = 0
        self._last_nodes = 0
        self._last_trees = 0
        self._paired_left = 0

    def observe(
        self,
        nodes: int,
        emitted: Sequence[int],
        *,
        alike: bool = True,
        same: bool = True,
        temperature: float = 0.0,
    ) -> None:
        """Learn from the trees of one step.

        Args:
            nodes: nodes of each tree.
            emitted: tokens that each tree emitted, its bonus token included.
            alike: whether the batch is about as large as that of the step before.
            same: whether most of its requests were in the step before. If not, its text is another.
            temperature: mean temperature of the requests.
        """
        self._go_on_with(bisect_left(TEMPERATURES, temperature))
        self._steps += 1
        trees = len(emitted) if nodes else 0
        fading = math.exp(-max(1 / TEXT_STEPS, trees / TEXT_TREES))
        text, deep = self._text, self._deep[self._class]
        deep.fade(fading)
        if text.levels > 1:  # A long time without drafts must leave something.
            text.fade(fading)
        if not trees:
            return
        if not same or not self._last_trees / 2 <= trees <= self._last_trees * 2:
            # Other requests may have another text, on which node counts can't be compared.
            self._recent = _MissRate()
            alike = False
        self._last_trees = trees
        depth, seen = self._levels[nodes], self._record(nodes)
        deep.observe(emitted, depth)
        most = depth + 1
        if max(emitted) > most:
            emitted = [min(count, most) for count in emitted]
        misses = trees - emitted.count(most)
        levels = (sum(emitted) - trees + misses) * self._gains[nodes]
        self._compare(nodes, misses, levels, alike)
        self._learn(text, misses, levels * seen.own, trees)
        seen.missed += misses

    def _go_on_with(self, temperature_class: int) -> None:
        if temperature_class == self._class:
            return
        self._deep.setdefault(temperature_class, _DeepPaths())
        self._texts.setdefault(
            temperature_class, _MissRate(self.miss * _PRIOR_LEVELS, _PRIOR_LEVELS)
        )
        self._class = temperature_class
        # The steps before had another text, on which node counts can't be compared.
        self._recent, self._paired_left = _MissRate(), 0

    def upper(self, nodes: int) -> float:
        """Upper estimate of the accepted drafts per tree: levels are missed as rarely as may be."""
        if not nodes:
            return 0.0
        seen = self._record(nodes)
        found = self._accepted(nodes, self.miss * self._gains[nodes] * seen.own * (1 - seen.doubt))
        return found + self._deep[self._class].beyond(nodes, self._levels[nodes])

    def _record(self, nodes: int) -> _Record:
        """What was seen of a number of nodes, as old as it is now."""
        seen = self._seen[nodes]
        seen.fade_to(self._steps)
        return seen

    @property
    def _text(self) -> _MissRate:
        return self._texts[self._class]

    @property
    def miss(self) -> float:
        """Chance that a chain misses a level."""
        return self._text.misses / self._text.levels

    def _accepted(self, nodes: int, miss: float) -> float:
        """Mean accepted drafts of a tree that misses each level with the same chance."""
        hit = 1 - min(max(miss, 0.001), 1.0)
        return hit * (1 - hit ** self._levels[nodes]) / (1 - hit)

    def _compare(self, nodes: int, misses: float, levels: float, alike: bool) -> None:
        """Compare the first steps of a number of nodes with those just before the change to it."""
        if nodes != self._last_nodes:
            self._before = _MissRate(self._recent.misses, self._recent.levels)
            self._last_nodes, self._paired_left = nodes, PAIRED
        if not alike:
            self._paired_left = 0
        before = self._before
        if self._paired_left and before.misses > 1:
            seen, expected = self._record(nodes), levels * before.misses / before.levels
            # Both rates are estimates: few trees before the change prove little.
            weight = before.misses / (before.misses + PAIRED * expected)
            seen.paired_misses += weight * misses
            seen.paired_expected += weight * expected
            self._paired_left -= 1

    def _learn(self, text: _MissRate, misses: float, levels: float, trees: int) -> None:
        """Add a step to the text, and begin a new text if recent trees contradict it."""
        text.misses += misses
        text.levels += levels
        recent = self._recent
        recent.fade(math.exp(-trees / RECENT))
        recent.misses += misses
        recent.levels += levels
        expected = recent.levels * (text.misses / text.levels)
        # Misses are taken for Poisson-distributed; a single request's few levels prove nothing.
        few = recent.levels <= RECENT / 2
        if not few and abs(recent.misses - expected) > CHANGE * math.sqrt(expected):
            self._texts[self._class] = _MissRate(recent.misses + 1, recent.levels + 1)

"""What a step takes: measured at the start, corrected while serving."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

AGE = 2000.0
"""Steps after which times that were seen count for 1/e: whatever went wrong is tried again."""

_TIMES = 128
"""Recent times of a number of nodes that are kept."""

_FEW = 16
"""Times that are no longer few: a number with fewer is tried again after a while."""

_BELIEF = 64.0
"""Times after which half of the difference to the other numbers is believed."""

_DOUBT = 0.05
"""What all numbers share counts for half when so much of one is believed: after three times."""

Costs = Mapping[int, Mapping[int, float]]
"""Seconds of a step by number of nodes, then by number of requests."""


@dataclass
class _Seen:
    """Seconds of recent steps; beyond what was measured at the start, if anything was."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMES))
    last: int = 0
    usual: float = 0.0
    """The lower quartile: what hinders a step only makes it longer."""

    def add(self, seconds: float, now: int) -> None:
        """Note a step's. It is asked for far oftener than noted, so the quartile is kept."""
        self.seconds.append(seconds)
        self.last = now
        self.usual = sorted(self.seconds)[len(self.seconds) // 4]

    def weight(self, now: int) -> float:
        """Times that count."""
        return len(self.seconds) * math.exp((self.last - now) / AGE)

    def believed(self, now: int) -> bool:
        """Whether these times are enough, or as recent as can be."""
        return len(self.seconds) >= _FEW or now - self.last < AGE / 4


class StepTimes:
    """Seconds of steps, by batch size and number of nodes.

    What was measured at the start leaves out what all numbers of a size share: the host, the
    sampler, long contexts. It is learned as one difference for all, and only with many times as one
    of each number, so that a few bad times don't rule a number out. Without measured costs, only
    what was seen is known.

    Args:
        prompts: whether prompts run in these steps, of any length. Without, a step that takes
            twice as long as it should was hindered.

    Attributes:
        costs: as measured at the start, without prompts.
    """

    def __init__(self, *, prompts: bool = False) -> None:
        self._longest = math.inf if prompts else 1.0
        self.costs: Costs = {}
        self._seen: dict[int, dict[int, _Seen]] = {}
        self._now = 0

    def seed(self, costs: Costs) -> None:
        """Take in what steps cost as measured at the start, and forget what was seen before."""
        self.costs = {nodes: dict(sorted(times.items())) for nodes, times in costs.items()}
        self._seen = {}

    def observe(self, size: int, nodes: int, seconds: float) -> None:
        """Note the time of a step."""
        self._now += 1
        cost = self.measured(size, nodes)
        if cost is not None:
            # Twice as long is a hiccup of the host, if no prompt is the cause; so is half.
            seconds = min(max(seconds - cost, -cost / 2), self._longest * cost)
        self._seen.setdefault(size, {}).setdefault(nodes, _Seen()).add(seconds, self._now)

    def predict(self, size: int, nodes: int) -> float | None:
        """Seconds that a step should take; None if nothing is known of it."""
        seen = self._seen.get(size, {}).get(nodes)
        cost = self.measured(size, nodes)
        if cost is None:
            return seen.usual if seen and seen.believed(self._now) else None
        more = shared = self._shared(size)
        if seen:
            weight = seen.weight(self._now)
            more += (seen.usual - shared) * weight / (weight + _BELIEF)
        return max(cost + more, cost / 2)

    def measured(self, size: int, nodes: int) -> float | None:
        """Seconds as measured at the start, between the numbers of requests that were."""
        costs = self.costs.get(nodes)
        if not costs:
            return None
        counts = list(costs)
        place = bisect_left(counts, size)
        if place == len(counts):
            return None
        if place == 0 or counts[place] == size:
            return costs[counts[place]]
        below, above = counts[place - 1], counts[place]
        share = (size - below) / (above - below)
        return costs[below] + share * (costs[above] - costs[below])

    def least(self, size: int, nodes: int) -> float:
        """Seconds that a step takes at least: as many as smaller batches do, and no drafts."""
        times = [
            seconds
            for other in self._seen
            if other <= size
            for number in {0, nodes}
            if number in self._seen[other] and (seconds := self.predict(other, number)) is not None
        ]
        return max(times, default=0.0)

    def seen(self, nodes: int) -> dict[int, float]:
        """Seconds of the steps of a number, by the size of the batch, as far as there were any."""
        return {
            size: (self.measured(size, nodes) or 0.0) + found[nodes].usual
            for size, found in sorted(self._seen.items())
            if nodes in found
        }

    def _shared(self, size: int) -> float:
        """What all numbers take more than was measured: each counts, most of all the known."""
        found = [
            (weight / (weight + _BELIEF), each.usual)
            for nodes, each in self._seen.get(size, {}).items()
            if self.measured(size, nodes) is not None and (weight := each.weight(self._now)) > 0
        ]
        total = sum(weight for weight, _ in found) + _DOUBT
        return sum(weight * usual for weight, usual in found) / total

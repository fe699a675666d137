"""How long a step takes: measured at the start, corrected while serving."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

AGE = 2000.0
"""Steps after which timings count for 1/e, so that whatever went wrong is tried again."""

_KEPT = 128
"""Recent timings that are kept per batch size and number of nodes."""

_FEW = 16
"""Fewer timings than this expire, so that the number of nodes is tried again."""

_BELIEF = 64.0
"""Timings after which half of a node count's own difference to the others is believed."""

_DOUBT = 0.05
"""Weight at which the shared correction counts half; it is reached after about three timings."""

Costs = Mapping[int, Mapping[int, float]]
"""Seconds of a step by number of nodes, then by number of requests."""


@dataclass
class _Timings:
    """Recent steps of one batch size and number of nodes.

    Attributes:
        seconds: what each took; beyond the measured cost where there is one.
        last: when the latest was recorded, in steps.
        usual: their lower quartile, since disturbances only make a step longer.
    """

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    last: int = 0
    usual: float = 0.0

    def add(self, seconds: float, now: int) -> None:
        """Record a step's seconds. Reads are far more frequent, so the quartile is cached."""
        self.seconds.append(seconds)
        self.last = now
        self.usual = sorted(self.seconds)[len(self.seconds) // 4]

    def weight(self, now: int) -> float:
        """Number of timings, discounted by their age."""
        return len(self.seconds) * math.exp((self.last - now) / AGE)

    def believed(self, now: int) -> bool:
        """Whether there are enough of them, or they are recent."""
        return len(self.seconds) >= _FEW or now - self.last < AGE / 4


class StepTimes:
    """Seconds of steps, by batch size and number of nodes.

    What was measured at the start leaves out what all node counts of a batch size have in common:
    the host, the sampler, long contexts. This excess is learned as one correction for all of them,
    and only after many timings as one for each by itself, so that a few bad timings don't rule a
    number of nodes out. Without measured costs, only timings are known.

    Args:
        prompts: whether prompts, of any length, run in these steps. If not, a step that takes twice
            as long as it should was disturbed, and no more than that is recorded.

    Attributes:
        costs: what was measured at the start, without prompts.
    """

    def __init__(self, *, prompts: bool = False) -> None:
        self._longest = math.inf if prompts else 1.0
        self.costs: Costs = {}
        self._seen: dict[int, dict[int, _Timings]] = {}
        self._now = 0

    def seed(self, costs: Costs) -> None:
        """Take in the costs measured at the start, and forget all timings."""
        self.costs = {nodes: dict(sorted(times.items())) for nodes, times in costs.items()}
        self._seen = {}

    def observe(self, size: int, nodes: int, seconds: float) -> None:
        """Record the time of a step."""
        self._now += 1
        cost = self.measured(size, nodes)
        if cost is not None:
            # Without a prompt, twice the cost is a hiccup of the host; so is half of it.
            seconds = min(max(seconds - cost, -cost / 2), self._longest * cost)
        self._seen.setdefault(size, {}).setdefault(nodes, _Timings()).add(seconds, self._now)

    def predict(self, size: int, nodes: int) -> float | None:
        """Expected seconds of a step; None if nothing is known of it."""
        seen = self._seen.get(size, {}).get(nodes)
        cost = self.measured(size, nodes)
        if cost is None:
            return seen.usual if seen and seen.believed(self._now) else None
        more = shared = self._shared_excess(size)
        if seen:
            weight = seen.weight(self._now)
            more += (seen.usual - shared) * weight / (weight + _BELIEF)
        return max(cost + more, cost / 2)

    def measured(self, size: int, nodes: int) -> float | None:
        """Seconds as measured at the start, interpolated between numbers of requests."""
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
        fraction = (size - below) / (above - below)
        return costs[below] + fraction * (costs[above] - costs[below])

    def least(self, size: int, nodes: int) -> float:
        """Lower bound of a step's seconds: the most that a step of no more work is known to take.

        These are the steps of batches up to this size, with as many nodes or with none.
        """
        times = [
            seconds
            for other in self._seen
            if other <= size
            for count in {0, nodes}
            if count in self._seen[other] and (seconds := self.predict(other, count)) is not None
        ]
        return max(times, default=0.0)

    def seen(self, nodes: int) -> dict[int, float]:
        """Usual seconds of the steps of a number of nodes that were timed, by batch size."""
        return {
            size: (self.measured(size, nodes) or 0.0) + found[nodes].usual
            for size, found in sorted(self._seen.items())
            if nodes in found
        }

    def _shared_excess(self, size: int) -> float:
        """Seconds beyond the measured costs that all node counts of a batch size share.

        It is a mean over the node counts, in which often timed ones weigh most.
        """
        found = [
            (weight / (weight + _BELIEF), each.usual)
            for nodes, each in self._seen.get(size, {}).items()
            if self.measured(size, nodes) is not None and (weight := each.weight(self._now)) > 0
        ]
        total = sum(weight for weight, _ in found) + _DOUBT
        return sum(weight * usual for weight, usual in found) / total

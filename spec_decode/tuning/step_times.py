"""How long a step takes: measured at the start, corrected while serving."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_graft.spec_decode.tuning.context_cost import LARGEST_SHARE, ContextCost, usual
from vllm_graft.spec_decode.tuning.excess import Point, Slope, level, place_of

AGE = 2000.0
"""Steps after which timings count for 1/e, so that whatever went wrong is tried again."""

_KEPT = 128
"""Recent timings that are kept per batch size and number of nodes."""

_FEW = 16
"""Fewer timings than this expire, so that the number of nodes is tried again."""

_BELIEF = 64.0
"""Timings after which half of a node count's own difference to the others is believed."""

Costs = Mapping[int, Mapping[int, float]]
"""Seconds of a step by number of nodes, then by number of requests."""


@dataclass
class _Timings:
    """Recent steps of one batch size and number of nodes.

    Attributes:
        seconds: what each took; beyond the measured cost where there is one.
        tokens: K/V tokens of each.
        cost: what was measured at the start; None if it was not.
        sure: from so many timings on, no time is taken for a hiccup: the cost is wrong.
        longest: more than so many times the cost is a hiccup of the host.
        last: when the latest was recorded, in steps.
    """

    cost: float | None
    longest: float
    sure: float = math.inf
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))
    last: int = 0
    _usual: tuple[float, float] | None = None
    """The cost per token of context for which the quartile is known, and the quartile."""

    def add(self, seconds: float, tokens: int, now: int) -> None:
        """Record a step's seconds and K/V tokens."""
        self.seconds.append(seconds)
        self.tokens.append(tokens)
        self.last, self._usual = now, None

    def usual(self, per_token: float) -> float:
        """What they usually take without the contexts.

        Reads are far more frequent than timings, so it is kept.
        """
        if self._usual is None or self._usual[0] != per_token:
            pairs = zip(self.seconds, self.tokens, strict=True)
            alone = usual(seconds - per_token * tokens for seconds, tokens in pairs)
            self._usual = per_token, self._likely(alone)
        return self._usual[1]

    def _likely(self, seconds: float) -> float:
        """The nearest time that can be right."""
        if self.cost is None:
            return max(seconds, (1 - LARGEST_SHARE) * usual(self.seconds))
        if len(self.seconds) >= self.sure:
            return max(seconds, -self.cost / 2)
        # Without a prompt, twice the cost is a hiccup of the host; so is half of it.
        return min(max(seconds, -self.cost / 2), self.longest * self.cost)

    def weight(self, now: int) -> float:
        """Number of timings, discounted by their age."""
        return len(self.seconds) * math.exp((self.last - now) / AGE)

    def believed(self, now: int) -> bool:
        """Whether there are enough of them, or they are recent."""
        return len(self.seconds) >= _FEW or now - self.last < AGE / 4


class StepTimes:
    """Seconds of steps, by batch size and number of nodes.

    What was measured at the start leaves out what all node counts of a batch size have in common:
    the host, the sampler. This excess is learned as one correction for all of them,
    and only after many timings as one for each by itself, so that a few bad timings don't rule a
    number of nodes out. Without measured costs, only timings are known. Contexts are left out of
    all of these, and come on top by a cost per token (see `ContextCost`), so that timings of short
    and of long contexts tell the same.

    Where rows read experts, the start may be wrong about what a node costs, as no measured batch
    asks for the experts that a served one asks for. There the correction has a slope, too, which
    steps without prompts tell for both kinds: prompts' own times differ too much to tell one.

    Args:
        context: the cost of contexts; steps with and without prompts share it.
        prompts: whether prompts, of any length, run in these steps. If not, a step that takes twice
            as long as it should was disturbed, and no more than that is recorded.
        sloped: whether the correction grows with the nodes.
        slope_of: the same steps without prompts, whose slope counts; None where it is these'.

    Attributes:
        costs: what was measured at the start, without prompts.
    """

    def __init__(
        self,
        context: ContextCost | None = None,
        *,
        prompts: bool = False,
        sloped: bool = False,
        slope_of: StepTimes | None = None,
    ) -> None:
        self._context = context or ContextCost()
        self._longest = math.inf if prompts else 1.0
        self._sloped, self._slope_of = sloped, slope_of or self
        self.costs: Costs = {}
        self._seen: dict[int, dict[int, _Timings]] = {}
        self._now = 0

    def seed(self, costs: Costs) -> None:
        """Take in the costs measured at the start, and forget all timings."""
        self.costs = {nodes: dict(sorted(times.items())) for nodes, times in costs.items()}
        self._seen = {}

    def observe(self, size: int, nodes: int, seconds: float, tokens: int = 0) -> None:
        """Record the time of a step whose requests have so many K/V tokens."""
        self._now += 1
        cost = self.measured(size, nodes)
        sure = _FEW if self._sloped else math.inf
        new = _Timings(cost, self._longest, sure)
        timings = self._seen.setdefault(size, {}).setdefault(nodes, new)
        timings.add(seconds - (cost or 0.0), tokens, self._now)

    def predict(self, size: int, nodes: int, tokens: int = 0) -> float | None:
        """Expected seconds of a step over so many K/V tokens; None if nothing is known of it."""
        seen = self._seen.get(size, {}).get(nodes)
        cost, context = self.measured(size, nodes), self._context.of(tokens)
        if cost is None:
            return self._usual(seen) + context if seen and seen.believed(self._now) else None
        more = shared = self._shared_excess(size, nodes)
        if seen:
            weight = seen.weight(self._now)
            more += (self._usual(seen) - shared) * weight / (weight + _BELIEF)
        return max(cost + more, cost / 2) + context

    def _usual(self, seen: _Timings) -> float:
        return seen.usual(self._context.per_token)

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

    def least(self, size: int, nodes: int, tokens: int = 0) -> float:
        """Lower bound of a step's seconds: the most that a step of no more work is known to take.

        These are the steps of batches up to this size, with as many nodes or with none, over as
        many K/V tokens.
        """
        times = [
            seconds
            for other in self._seen
            if other <= size
            for count in {0, nodes}
            if count in self._seen[other]
            and (seconds := self.predict(other, count, tokens)) is not None
        ]
        return max(times, default=0.0)

    def seen(self, nodes: int) -> dict[int, float]:
        """Usual seconds, without contexts, of the timed steps of some nodes, by batch size."""
        return {
            size: (self.measured(size, nodes) or 0.0) + self._usual(found[nodes])
            for size, found in sorted(self._seen.items())
            if nodes in found
        }

    def slope(self, size: int) -> Slope:
        """How the seconds beyond the measured costs grow with the nodes, for a batch size."""
        return Slope.through(self._points(size))

    def _shared_excess(self, size: int, nodes: int) -> float:
        """Seconds beyond the measured costs, as all timed node counts of a batch size tell them.

        It is a mean over the node counts, in which often timed ones weigh most, and a slope where
        there is to be one.
        """
        points = self._points(size)
        if not self._sloped or not points:
            return level(points)
        middle = Slope.through(points).middle
        return level(points) + self._slope_of.slope(size).rise * (place_of(nodes) - middle)

    def _points(self, size: int) -> list[Point]:
        """The timed node counts of a batch size whose cost was measured."""
        return [
            Point(weight / (weight + _BELIEF), place_of(nodes), self._usual(each))
            for nodes, each in self._seen.get(size, {}).items()
            if self.measured(size, nodes) is not None and (weight := each.weight(self._now)) > 0
        ]

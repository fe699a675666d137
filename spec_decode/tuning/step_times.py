"""Times of steps: measured at the start, corrected while serving."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_graft.spec_decode.chunking.handover import Handover
from vllm_graft.spec_decode.tuning.context_cost import LARGEST_SHARE, ContextCost, Rates, usual
from vllm_graft.spec_decode.tuning.excess import Floor, Point, Slope, Timed, level, place_of

AGE = 2000.0
"""Steps after which timings count for 1/e, so that whatever went wrong is tried again."""

_KEPT = 128
"""Recent timings that are kept per batch size and number of nodes."""

_FEW = 16
"""Fewer timings than this expire, so that the number of nodes is tried again."""

_BELIEF = 64.0
"""Timings after which half of a node count's own difference to the others is believed."""

_CLEAR = 0.06
"""Part of the expected seconds by which steps must differ for a measured cost to count as wrong;
undisturbed ones differ by 1 to 3 %. With a slope, which corrects what it can, twice as much."""

_PROOF = 2
"""Timings of steps clearly shorter than expected that prove a measured cost wrong."""

_LEAST = 0.2
"""The part of its measured cost that a step takes at least."""

Costs = Mapping[int, Mapping[int, float]]
"""Seconds of a step by number of nodes, then by number of requests."""

MEASURED: Handover[Costs] = Handover()
"""Costs that each engine's workers have measured, until the scheduler is built."""


@dataclass
class _Timings:
    """Recent steps of one batch size and number of nodes.

    Attributes:
        cost: what was measured at the start; None if it was not.
        longest: more than so many times the cost is a hiccup of the host.
        seconds: what each took; beyond the measured cost where there is one.
        tokens: K/V tokens of each.
        last: when the latest was recorded, in steps.
    """

    cost: float | None
    longest: float
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))
    last: int = 0
    _usual: tuple[float, float, float] | None = None
    """The cost per token for which the next two hold, the quartile, and the nearest likely time."""

    def add(self, seconds: float, tokens: int, now: int) -> None:
        self.seconds.append(seconds)
        self.tokens.append(tokens)
        self.last, self._usual = now, None

    def usual(self, per_token: float, *, likely: bool = True) -> float:
        """Their usual seconds without contexts of so many seconds per token, or the nearest time
        that can be right. Reads are far more frequent than timings, so both are kept."""
        if self._usual is None or self._usual[0] != per_token:
            alone = usual(self._alone(per_token))
            self._usual = per_token, alone, self._likely(alone)
        return self._usual[1 + likely]

    def _likely(self, seconds: float) -> float:
        if self.cost is None:
            return max(seconds, (1 - LARGEST_SHARE) * usual(self.seconds))
        likely = max(seconds, (_LEAST - 1) * self.cost)
        # So many are no hiccup: the cost is wrong, or the host slower than the device. Of fewer,
        # and without a prompt, twice the cost is a hiccup of the host.
        return likely if len(self.seconds) >= _FEW else min(likely, self.longest * self.cost)

    def proven(self, per_token: float) -> float:
        """Seconds that at least two of them do not exceed: of four and more, what they usually
        take.

        One is no proof, as a step that seems short may follow one that the host held up.
        """
        if len(self.seconds) >= 4:
            return self.usual(per_token)
        return self._likely(sorted(self._alone(per_token))[1])

    def _alone(self, per_token: float) -> Iterator[float]:
        pairs = zip(self.seconds, self.tokens, strict=True)
        return (seconds - per_token * tokens for seconds, tokens in pairs)

    def weight(self, now: int) -> float:
        """Number of timings, discounted by their age."""
        return len(self.seconds) * math.exp((self.last - now) / AGE)

    def believed(self, now: int) -> bool:
        return len(self.seconds) >= _FEW or now - self.last < AGE / 4


class _Told(NamedTuple):
    """The lessons of all timed node counts of one batch size, until another step is timed or the
    rates of contexts change."""

    now: int
    rates: Rates
    timed: list[Timed]
    level: float
    slope: Slope
    floor: Floor


class StepTimes:
    """Seconds of steps, by batch size and number of nodes.

    What was measured at the start leaves out what all node counts have in common: the host, the
    sampler. This excess is learned as one correction for all, and only after many timings as one
    for each, so that a few bad ones don't rule a number out. Contexts come on top (see
    `ContextCost`). Without measured costs, only timings are known.

    Where the host is slower than the device, more nodes are free (see `Floor`). Where rows read
    experts, random tokens ask for other experts than a text, so the correction has a slope instead.
    A cost that something disturbed at the start is mended (see `mend`). Steps without prompts tell
    all three for all steps: prompts' own times differ too much.

    Args:
        context: the cost of contexts; steps with and without prompts share it.
        prompts: whether prompts, of any length, run in these steps. If not, a step that takes twice
            as long as it should was disturbed, and no more than that is recorded.
        sloped: whether the correction grows with the nodes.
        slope_of: the same steps without prompts; None where these are the steps' own.
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
        self._kept: dict[int, _Told] = {}
        self._now = 0

    def seed(self, costs: Costs) -> None:
        """Take in the costs measured at the start, and forget all timings."""
        self.costs = {nodes: dict(sorted(times.items())) for nodes, times in costs.items()}
        self._seen, self._kept = {}, {}

    def observe(self, size: int, nodes: int, seconds: float, tokens: int = 0) -> None:
        """Record the time of a step whose requests have so many K/V tokens."""
        self._now += 1
        cost = self.measured(size, nodes)
        new = _Timings(cost, self._longest)
        timings = self._seen.setdefault(size, {}).setdefault(nodes, new)
        timings.add(seconds - (cost or 0.0), tokens, self._now)

    def predict(self, size: int, nodes: int, tokens: int = 0) -> float | None:
        """Expected seconds of a step over so many K/V tokens; None if nothing is known of it."""
        seen = self._seen.get(size, {}).get(nodes)
        cost, context = self.measured(size, nodes), self._context.of(tokens, nodes)
        if cost is None:
            return self._usual(nodes, seen) + context if seen and seen.believed(self._now) else None
        more = self._shared_excess(size, nodes) + self._slope_of.mend(size, nodes)
        if seen:
            weight = seen.weight(self._now)
            more += (self._usual(nodes, seen) - more) * weight / (weight + _BELIEF)
        return max(cost + more, _LEAST * cost) + context

    def mend(self, size: int, nodes: int) -> float:
        """Seconds by which its own timings, beyond noise, prove a measured cost wrong; else 0.

        Two steps that are clearly shorter than expected prove it, as no disturbance makes a step
        shorter; so do many longer ones. Where the host bounds the steps, they prove nothing.
        """
        seen, cost = self._seen.get(size, {}).get(nodes), self.measured(size, nodes)
        if seen is None or cost is None or len(seen.seconds) < _PROOF:
            return 0.0
        if not self._sloped and self.floor(size).seconds:
            return 0.0
        shared = self._shared_excess(size, nodes)
        noise = _CLEAR * (cost + shared) * (2 if self._sloped else 1)
        proven = seen.proven(self._context.rates.of(nodes)) - shared
        if proven < 0:
            return min(0.0, proven + noise)
        if len(seen.seconds) < _FEW:
            return 0.0
        difference = self._usual(nodes, seen) - shared
        # What made them longer may have gone, so that their age counts.
        return max(0.0, difference - noise) * seen.weight(self._now) / len(seen.seconds)

    def judged(self, size: int) -> dict[int, bool]:
        """Whether measured costs are wrong, of the numbers of nodes whose timings can tell it."""
        return {
            nodes: self.mend(size, nodes) != 0
            for nodes, timings in self._seen.get(size, {}).items()
            if len(timings.seconds) >= _PROOF
        }

    def _usual(self, nodes: int, seen: _Timings) -> float:
        return seen.usual(self._context.rates.of(nodes))

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
        """Lower bound of a step's seconds: the most that a step of no more work (no larger batch,
        as many nodes or none, as many K/V tokens) is known to take."""
        times = [
            seconds
            for other in self._seen
            if other <= size
            for count in {0, nodes}
            if count in self._seen[other]
            and (seconds := self.predict(other, count, tokens)) is not None
        ]
        return max(times, default=0.0)

    def slope(self, size: int) -> Slope:
        return self._told(size).slope

    def floor(self, size: int) -> Floor:
        return self._told(size).floor

    def _shared_excess(self, size: int, nodes: int) -> float:
        """Seconds beyond the measured costs that all timed node counts of a batch size tell: a mean
        in which often timed ones weigh most, with a slope, or with what the host's time asks
        for."""
        told = self._told(size)
        if not told.timed:
            return 0.0
        if self._sloped:
            rise = self._slope_of.slope(size).rise
            return told.level + rise * (place_of(nodes) - told.slope.middle)
        floor, cost = self._slope_of.floor(size), self.measured(size, nodes)
        if not floor.seconds or cost is None:
            return told.level
        if self._slope_of is self:
            return floor.beyond(cost)
        return told.level + floor.beyond(cost) - floor.mean_beyond(told.timed)

    def _told(self, size: int) -> _Told:
        rates = self._context.rates
        kept = self._kept.get(size)
        if kept is not None and (kept.now, kept.rates) == (self._now, rates):
            return kept
        points, timed = [], []
        for nodes, each in self._seen.get(size, {}).items():
            cost, weight = self.measured(size, nodes), each.weight(self._now)
            if cost is None or weight <= 0:
                continue
            believed = weight / (weight + _BELIEF)
            beyond = self._usual(nodes, each)
            if self._slope_of is not self:
                beyond -= self._slope_of.mend(size, nodes)
            elif not self._sloped and beyond < -_CLEAR * cost:
                # A cost that was too high says nothing of the others.
                continue
            points.append(Point(believed, place_of(nodes), beyond))
            # Hiccups are among these, as the host's time may be many times a small model's cost.
            timed.append(Timed(believed, cost, each.usual(rates.of(nodes), likely=False)))
        made = level(points), Slope.through(points), Floor.under(timed)
        told = self._kept[size] = _Told(self._now, rates, timed, *made)
        return told

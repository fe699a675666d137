"""Seconds of steps: measured at the start, corrected by what steps take while serving.

One model holds for all steps::

    seconds = max(host, cost + shared + own) + tokens * (token + row * (nodes + 1)) + prompts

A number of nodes has a measured `cost`. The correction `shared` is that of all numbers of one batch
size; it grows with the nodes where rows read experts. `own` is what one number takes besides. Each
K/V token costs the same in all steps, and more with each row of its request (`Rates`). `prompts` is
what prompts of any length add. Corrections are least squares drawn to 0 (ridge), so that few
timings correct little; only the time of the `host` is found by a rule."""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from vllm_graft.spec_decode.chunking.graph_fit import Handover

AGE = 2000.0
"""Timings after which one counts for 1/e. Raised, a machine that has changed is noticed later."""

_AGAIN = 625.0
"""Steps after which little tried numbers are tried again. Raised, they are given up for longer."""

KEPT = 64
"""Latest timings of one kind of step. Raised, sorting them takes longer."""

MANY = 16
"""Timings that are no hiccup, and after which half of `own` is believed. Raised, noise rules fewer
numbers out, and costs that were measured too low are found out later."""

FEW = 1.5
"""Timings, two that are a little older, of which clearly shorter ones prove a cost wrong."""

_FITTED = (4, 8, 16)
"""Numbers of timings with which new contexts begin to count."""

DOUBT = 0.05
"""Weight of the prior of `shared`, of a timed number 1 at most: it is half believed after three
timings. Raised, it is learned later."""

NOISE = 0.06
"""Part of its time by which a number must differ to have a wrong cost; undisturbed steps differ by
1 to 3 %. Raised, wrong costs are mended less."""

HOST = 0.25
"""Part of a cost that a device-bound step takes more at most, where costs alike tell nothing else.
Raised, the host of a small model is found less often."""

ALIKE = 1.1
"""Times of host-bound steps, or costs, with a smaller ratio are alike. Raised, steps that something
disturbed are taken for the host's."""

LEAST = 0.1
"""The part of a cost or a timing that no correction takes away. Raised, long contexts count less
and costs that are far too high are mended less."""

TOKENS = 8192.0
"""Spread of contexts at which half of a token's cost is believed. Raised, noise of short contexts
is extrapolated less, and long contexts are learned later."""

ROWS = 16
"""Rows that multiply a K/V token while it is read (FP8, H100). Raised, contexts are blamed more."""

COMPARED = 1 / 16
"""Weight of comparing numbers of nodes by measured costs, which have four times the errors of
timings, to tell what rows cost. Raised, wrong costs make rows seem dear."""

FIT = 64
"""Timings between fits of `Rates`, at most. Raised, it takes less time, and learns later."""

Costs = Mapping[int, Mapping[int, float]]
"""Seconds of a step by number of nodes, then by number of requests."""

MEASURED: Handover[Costs] = Handover()
"""Costs that each engine's workers have measured, until the scheduler is built."""


class Rates(NamedTuple):
    """Seconds that a step takes per K/V token: for reading it, and for each row of its request."""

    token: float = 0.0
    row: float = 0.0

    def of(self, nodes: int) -> float:
        return self.token + self.row * (nodes + 1)


class Point(NamedTuple):
    """Steps that are alike: how much they are believed (below 1), their nodes, mean K/V tokens, and
    the seconds that they usually take, or take beyond something."""

    weight: float
    nodes: int
    tokens: float
    seconds: float


def fitted_rates(groups: Iterable[tuple[float, list[Point]]]) -> Rates:
    """The rates that differences within groups, which weigh so much, tell; never below 0."""
    xx = xy = yy = xs = ys = 0.0
    for weight, points in groups:
        if len(points) < 2:
            continue
        total = sum(each.weight for each in points)
        triples = [(p.tokens, p.tokens * (p.nodes + 1), p.seconds) for p in points]
        means = [
            sum(p.weight * each[axis] for p, each in zip(points, triples)) / total
            for axis in range(3)
        ]
        for point, each in zip(points, triples):
            x, y, seconds = (value - mean for value, mean in zip(each, means))
            w = weight * point.weight
            xx, xy, yy = xx + w * x * x, xy + w * x * y, yy + w * y * y
            xs, ys = xs + w * x * seconds, ys + w * y * seconds
    # A token's cost with the mean rows comes first. Rows tell what that leaves over.
    prior, prior_of_rows = TOKENS**2, (ROWS * TOKENS) ** 2
    rows, mean = xy / (xx + prior), max(xs / (xx + prior), 0.0)
    spread = yy - rows * (2 * xy - rows * xx) + prior_of_rows
    row = max((ys - rows * xs - mean * (xy - rows * xx)) / spread, 0.0)
    if rows * row > mean:
        return Rates(0.0, max(ys / (yy + prior_of_rows), 0.0))
    return Rates(mean - rows * row, row)


@dataclass
class _Timings:
    """Recent steps of one kind whose contexts are alike, within a factor of 2: what each took, its
    K/V tokens, and when the latest was recorded, in timings."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    last: int = 0
    _usual: tuple[float, float] | None = None

    def add(self, seconds: float, tokens: int, now: int) -> None:
        self.seconds.append(seconds)
        self.tokens.append(tokens)
        self.last, self._usual = now, None

    def count(self, now: int) -> float:
        """Number of timings, discounted by their age."""
        return len(self.seconds) * math.exp((self.last - now) / AGE)

    @property
    def usual(self) -> tuple[float, float]:
        """Mean K/V tokens, and the lower quartile of the seconds, since disturbances only make a
        step longer; but not the shortest of several, as it may follow one that was held up."""
        if self._usual is None:
            ordered, count = sorted(self.seconds), len(self.seconds)
            place = max(count // 4, min(count - 1, 1))
            self._usual = sum(self.tokens) / count, ordered[place]
        return self._usual


class Timed(NamedTuple):
    """One number of nodes of a batch size.

    Attributes:
        timings: their number, discounted by their age.
        last: when the latest was recorded, in timings.
        seconds: what a step usually takes without its context.
        cost: what was measured at the start; None if it was not.
    """

    timings: float
    last: int
    seconds: float
    cost: float | None

    @property
    def weight(self) -> float:
        return self.timings / (self.timings + MANY)


class Shared(NamedTuple):
    """The corrections that all numbers of nodes of one batch size share. `level`: seconds beyond
    the cost, at the `middle` of the line. `rise`: more seconds for each doubling of the rows.
    `host`: the least seconds of a step; 0 if the device is slower in all steps that were timed."""

    level: float = 0.0
    rise: float = 0.0
    middle: float = 0.0
    host: float = 0.0

    def seconds(self, nodes: int, cost: float) -> float:
        device = cost + self.level + self.rise * (_place(nodes) - self.middle)
        return max(self.host, device, LEAST * cost)

    def own(self, timed: Timed, nodes: int, cost: float) -> tuple[float, bool]:
        """What a number takes besides, and whether that proves its cost wrong: then all of it
        beyond noise is believed. Where the host bounds the steps, they prove nothing."""
        shared = self.seconds(nodes, cost)
        own, noise = timed.seconds - shared, NOISE * shared
        if timed.timings < MANY:
            # Of few timings, twice the cost is a hiccup of the host.
            own = min(own, cost)
        few = FEW if own < 0 else MANY
        if self.host or timed.timings < few or abs(own) <= noise:
            return timed.weight * own, False
        return own - (1 - timed.weight) * math.copysign(noise, own), True

    @classmethod
    def of(cls, points: list[Point], *, sloped: bool = False) -> Self:
        """Weighted least squares through points beyond their costs, drawn to 0."""
        total = sum(each.weight for each in points)
        if not total:
            return cls()
        level = sum(each.weight * each.seconds for each in points) / (total + DOUBT)
        if not sloped:
            return cls(level)
        middle = sum(each.weight * _place(each.nodes) for each in points) / total
        spread = rise = 0.0
        for each in points:
            distance = _place(each.nodes) - middle
            spread += each.weight * distance**2
            rise += each.weight * distance * each.seconds
        return cls(level, rise / (spread + DOUBT), middle)


def _place(nodes: int) -> float:
    return math.log2(nodes + 1)


def with_host(shared: Shared, points: list[tuple[float, float, float]]) -> Shared:
    """The corrections with the host's time, where it bounds some steps.

    The device works on one step while the host prepares the next one, so more nodes are free until
    the device takes longer. No step takes less than its cost and what the device does besides. So
    the number that takes least beyond its cost tells the latter, and the host bounds those that
    take clearly more, if no other takes less. With one number, or costs that are alike, what takes
    far more than its cost is taken for the host's, so that more nodes are tried, which tells.

    Args:
        points: weight, cost and seconds of each number of nodes.
    """
    if not points:
        return shared
    costs = [cost for _, cost, _ in points]
    added = max(0.0, min(seconds - cost for _, cost, seconds in points))
    if max(costs) < ALIKE * min(costs):
        added = min(added, HOST * max(costs))
    shortest = min(seconds for *_, seconds in points)
    bound = [
        (weight, seconds)
        for weight, cost, seconds in points
        if seconds - cost > added + HOST * cost and seconds <= ALIKE * shortest
    ]
    total = sum(weight for weight, _ in bound)
    if not total:
        return shared
    return Shared(added, host=sum(weight * seconds for weight, seconds in bound) / total)


class _Size(NamedTuple):
    """What the timings of one batch size tell: numbers of nodes that were timed without prompts and
    beside them, the corrections that they share, and the seconds that prompts add."""

    alone: dict[int, Timed]
    beside: dict[int, Timed]
    shared: Shared
    added: float


class StepTimes:
    """Seconds of steps, by batch size and number of nodes (see the module).

    A number that something disturbed when its cost was measured has a correction of its own: two
    steps that are clearly shorter than expected prove a cost wrong, as no disturbance makes a step
    shorter; so do `MANY` longer ones. Without measured costs, only timings are known.

    Args:
        experts: whether rows read experts. Random tokens, with which costs are measured, ask for
            other experts than a text, so `shared` grows with the nodes, and no host is looked for.
        plain_apart: whether plain steps leave the host much less to do, as without a draft model.
    """

    def __init__(self, *, experts: bool = False, plain_apart: bool = False) -> None:
        self.costs: Costs = {}
        self._measured: dict[tuple[int, int], float | None] = {}
        self.rates = Rates()
        self._experts, self._plain_apart = experts, plain_apart
        self._seen: dict[tuple[int, bool], dict[int, dict[int, _Timings]]] = {}
        self._kept: dict[int, tuple[int, _Size]] = {}
        self._now = 0

    def seed(self, costs: Costs) -> None:
        """Take in the costs measured at the start, and forget all timings."""
        self.costs = {nodes: dict(sorted(times.items())) for nodes, times in costs.items()}
        self._seen, self._kept, self.rates = {}, {}, Rates()
        self._measured.clear()

    def measured(self, size: int, nodes: int) -> float | None:
        """Seconds as measured at the start, interpolated between numbers of requests."""
        if (size, nodes) not in self._measured:
            self._measured[size, nodes] = self._between(self.costs.get(nodes), size)
        return self._measured[size, nodes]

    @staticmethod
    def _between(costs: Mapping[int, float] | None, size: int) -> float | None:
        """Seconds at a size, from those of ascending sizes around it; None above all of them."""
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

    def observe(
        self, size: int, nodes: int, seconds: float, tokens: int = 0, *, prompts: bool = False
    ) -> None:
        """Record the time of a step whose requests have so many K/V tokens."""
        self._now += 1
        classes = self._seen.setdefault((size, prompts), {}).setdefault(nodes, {})
        if (timings := classes.get(length := tokens.bit_length())) is None:
            timings = classes[length] = _Timings()
        timings.add(seconds, tokens, self._now)
        if self._now % FIT == 0 or len(timings.seconds) in _FITTED:
            self.rates = fitted_rates(self._groups())

    def _groups(self) -> Iterator[tuple[float, list[Point]]]:
        """Points to compare, and their weight: steps of one kind, and those of one batch size whose
        contexts are alike, by what they take beyond their measured costs."""
        for (size, prompts), kinds in self._seen.items():
            alike: dict[int, list[Point]] = {}
            for nodes, classes in kinds.items() if not prompts else ():
                cost = None if self._experts else self.measured(size, nodes)
                points = []
                for length, timings in classes.items():
                    count, (tokens, seconds) = timings.count(self._now), timings.usual
                    points.append(Point(count / (count + MANY), nodes, tokens, seconds))
                    # A cost that was too high says nothing of contexts.
                    if cost is not None and seconds > cost and length:
                        beyond = points[-1]._replace(seconds=seconds - cost)
                        alike.setdefault(length, []).append(beyond)
                yield 1.0, points
            yield from ((COMPARED, points) for points in alike.values())

    def predict(
        self, size: int, nodes: int, tokens: int = 0, *, prompts: bool = False
    ) -> float | None:
        """Expected seconds of a step over so many K/V tokens; None if nothing is known of it."""
        told = self._told(size)
        found = self._alone(told.alone.get(nodes), told.shared, size, nodes)
        if prompts:
            timed = told.beside.get(nodes)
            if found is None:
                found = timed.seconds if timed else None
            else:
                own = timed.weight * (timed.seconds - found - told.added) if timed else 0.0
                found += max(told.added + own, 0.0)
        return None if found is None else found + self.rates.of(nodes) * tokens

    def _alone(self, timed: Timed | None, shared: Shared, size: int, nodes: int) -> float | None:
        """Seconds without prompts and contexts."""
        cost = self.measured(size, nodes)
        if cost is not None:
            own, _ = shared.own(timed, nodes, cost) if timed else (0.0, False)
            if self._plain_apart and not nodes and timed and timed.timings >= FEW:
                # The host has less to do than in the others: they tell it alone.
                beyond = timed.seconds - shared.seconds(nodes, cost)
                own = beyond if beyond < -NOISE * timed.seconds else own
            return max(shared.seconds(nodes, cost) + own, LEAST * cost)
        # A number that was tried little and long ago is tried again.
        known = timed and (timed.timings >= MANY or self._now - timed.last < _AGAIN)
        return timed.seconds if timed and known else None

    def timings(self, size: int, nodes: int) -> float:
        """Timings without prompts of one number of nodes, discounted by their age."""
        timed = self._told(size).alone.get(nodes)
        return timed.timings if timed else 0.0

    def judged(self, size: int) -> dict[int, bool]:
        """Whether measured costs are wrong, of the numbers of nodes whose timings can tell it."""
        told = self._told(size)
        return {
            nodes: told.shared.own(timed, nodes, timed.cost)[1]
            for nodes, timed in told.alone.items()
            if timed.cost is not None and timed.timings >= FEW
        }

    def added(self, size: int) -> float:
        """Seconds that prompts add to a step."""
        return self._told(size).added

    def least(self, size: int, nodes: int, tokens: int = 0) -> float:
        """Lower bound of a step's seconds: the most that a step of no more work (no larger batch,
        as many nodes or none, as many K/V tokens) is known to take."""
        times = [
            seconds
            for other, prompts in self._seen
            if other <= size and not prompts
            for count in {0, nodes}
            if count in self._seen[other, prompts]
            and (seconds := self.predict(other, count, tokens)) is not None
        ]
        return max(times, default=0.0)

    def _told(self, size: int) -> _Size:
        """Kept until another step is timed."""
        kept = self._kept.get(size)
        if kept is None or kept[0] != self._now:
            alone = self._timed(size, prompts=False)
            shared = self._shared(alone)
            beside, points = self._timed(size, prompts=True), []
            for nodes, timed in beside.items():
                less = self._alone(alone.get(nodes), shared, size, nodes)
                if less is not None:
                    points.append(Point(timed.weight, nodes, 0.0, timed.seconds - less))
            added = max(Shared.of(points).level, 0.0)
            kept = self._kept[size] = self._now, _Size(alone, beside, shared, added)
        return kept[1]

    def _timed(self, size: int, *, prompts: bool) -> dict[int, Timed]:
        found = {}
        for nodes, classes in self._seen.get((size, prompts), {}).items():
            count = seconds = 0.0
            for timings in classes.values():
                weight, (tokens, usual) = timings.count(self._now), timings.usual
                alone = max(usual - self.rates.of(nodes) * tokens, LEAST * usual)
                count, seconds = count + weight, seconds + weight * alone
            last = max(timings.last for timings in classes.values())
            if count:  # After very long nothing is left.
                found[nodes] = Timed(count, last, seconds / count, self.measured(size, nodes))
        return found

    def _shared(self, timed: Mapping[int, Timed]) -> Shared:
        points, for_host, hiccup = [], [], 0.0
        plain = timed.get(0) if self._plain_apart and len(timed) > 1 else None
        if plain and plain.cost and plain.seconds > (1 + HOST) * plain.cost:
            # The host bounds steps without drafts, and has less to do than in the others.
            timed = {nodes: each for nodes, each in timed.items() if nodes}
            hiccup = 2 * plain.seconds
        for nodes, each in timed.items():
            if each.cost is None:
                continue
            # The host's time may be many times a small model's cost.
            for_host.append((each.weight, each.cost, each.seconds))
            beyond = each.seconds - each.cost
            # A cost that was too high says nothing of the others.
            if self._experts or beyond > -NOISE * each.cost:
                most = max(hiccup - each.cost, each.cost)
                beyond = beyond if each.timings >= MANY else min(beyond, most)
                points.append(Point(each.weight, nodes, 0.0, beyond))
        shared = Shared.of(points, sloped=self._experts)
        return shared if self._experts else with_host(shared, for_host)

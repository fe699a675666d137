"""Which of two ways computes tree attention: a pure choice from measured times."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Way = Literal["triton", "flash"]
"""``triton``: one Triton kernel, split over the keys. ``flash``: FlashAttention 3 over the prefix,
then the tree's own rows."""

CONTEXTS = (512, 2048, 8192, 32768)
"""Keys a request at which the ways are compared, as far as the model's length goes."""

BATCHES = (1, 4, 16, 64)
"""Requests at which they are compared, as far as the engine's largest number goes."""

MAX_KEYS = 1 << 20
"""Keys of all requests above which a point is left out: few caches hold more, and it takes long."""


class Size(NamedTuple):
    """What a captured graph fixes."""

    num_reqs: int
    rows: int


class Point(NamedTuple):
    """One measurement's sizes."""

    num_reqs: int
    rows: int
    context: int

    @property
    def size(self) -> Size:
        """The point without its context."""
        return Size(self.num_reqs, self.rows)


Costs = Mapping[Point, Mapping[Way, float]]
"""Microseconds a layer of each way."""


def points(widths: Collection[int], max_reqs: int, max_model_len: int) -> list[Point]:
    """Where to measure: at most three widths, four numbers of requests and three contexts.

    Args:
        widths: rows a request (root and nodes) that the engine may verify.
        max_reqs: largest number of requests.
        max_model_len: longest context.
    """
    ordered = sorted(set(widths))
    chosen = sorted({ordered[0], ordered[len(ordered) // 2], ordered[-1]}) if ordered else []
    batches = sorted({min(batch, max_reqs) for batch in BATCHES})
    contexts = [context for context in CONTEXTS if context <= max_model_len] or [max_model_len]
    return [
        Point(batch, rows, context)
        for rows in chosen
        for batch in batches
        for context in contexts
        # The shortest context is measured for every size: each needs one to be decided by.
        if context == contexts[0] or batch * context <= MAX_KEYS
    ]


def choose(costs: Costs, size: Size) -> Way:
    """The way whose worst loss against the better one, over the contexts, is the smallest.

    A graph is captured for a size, and replayed at any context. A size that was not measured goes
    by the nearest that was, in the ratios of its requests and rows; the larger one of two.

    Raises:
        ValueError: nothing was measured.
    """
    if not costs:
        raise ValueError("no way of tree attention was measured")
    nearest = min({point.size for point in costs}, key=lambda known: _distance(known, size))
    losses: defaultdict[Way, float] = defaultdict(float)
    for point, times in costs.items():
        if point.size == nearest:
            best = min(times.values())
            for way, time in times.items():
                losses[way] = max(losses[way], time / best)
    # Of equals the first in the alphabet: the same on every rank.
    return min(losses, key=lambda way: (losses[way], way))


def _distance(known: Size, size: Size) -> tuple[float, int]:
    ratios = (math.log(a / b) for a, b in zip(known, size))
    return round(sum(map(abs, ratios)), 9), -known.num_reqs * known.rows


@dataclass
class WayChoice:
    """The way of each size of one engine's batches.

    Attributes:
        asked: what the configuration says.
        why: why there is no choice; empty where the times decide.
        costs: measured times.
        used: the way of each size that came up.
        declined: layer calls that took the Triton kernel all the same, outside of graphs: their
            requests differed in rows, or their query was not quantized beside an fp8 cache.
    """

    asked: Literal["auto", "triton", "flash"]
    why: str = ""
    costs: Costs = field(default_factory=dict)
    used: dict[Size, Way] = field(default_factory=dict)
    declined: int = 0

    def of(self, num_reqs: int, rows: int) -> Way:
        """The way of a batch of `num_reqs` requests of `rows` rows each, the same each time."""
        size = Size(num_reqs, rows)
        way = self.used.get(size)
        if way is None:
            way = self.used[size] = self._decide(size)
        return way

    def _decide(self, size: Size) -> Way:
        if self.asked != "auto":
            return self.asked
        return choose(self.costs, size) if self.costs else "triton"

    def report(self) -> dict[str, Any]:
        """Plain values for ``graft_info()``."""
        return {
            "asked": self.asked,
            "why": self.why,
            "microseconds": [
                {**point._asdict(), **{way: round(time, 1) for way, time in times.items()}}
                for point, times in self.costs.items()
            ],
            "used": {f"{size.num_reqs}x{size.rows}": way for size, way in self.used.items()},
            "declined": self.declined,
        }

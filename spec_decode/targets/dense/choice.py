"""Which of two kernels computes tree attention: a pure choice from measured times."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

KernelName = Literal["triton", "flash"]
"""``triton``: one Triton kernel, split over the keys. ``flash``: FlashAttention 3 over the prefix,
then a small kernel over the tree's own rows."""

CONTEXTS = (512, 2048, 8192, 32768)
"""Keys per request at which the kernels are compared, up to the model's longest context."""

BATCHES = (1, 4, 16, 64)
"""Numbers of requests at which they are compared, up to the engine's largest."""

MAX_KEYS = 1 << 20
"""Keys of all requests above which a point is left out: few caches hold more, and it takes long."""


class Size(NamedTuple):
    """What a captured graph fixes."""

    num_reqs: int
    rows: int


class Point(NamedTuple):
    """The sizes of one measurement."""

    num_reqs: int
    rows: int
    context: int

    @property
    def size(self) -> Size:
        return Size(self.num_reqs, self.rows)


Costs = Mapping[Point, Mapping[KernelName, float]]
"""Microseconds per layer of each kernel."""


def points(widths: Collection[int], max_reqs: int, max_model_len: int) -> list[Point]:
    """Where to measure `widths` (root and nodes): at most three of them."""
    ordered = sorted(set(widths))
    chosen = sorted({ordered[0], ordered[len(ordered) // 2], ordered[-1]}) if ordered else []
    batches = sorted({min(batch, max_reqs) for batch in BATCHES})
    contexts = [context for context in CONTEXTS if context <= max_model_len] or [max_model_len]
    return [
        Point(batch, rows, context)
        for rows in chosen
        for batch in batches
        for context in contexts
        # The shortest context is measured for every size, so that each size has a measurement.
        if context == contexts[0] or batch * context <= MAX_KEYS
    ]


def choose(costs: Costs, size: Size) -> KernelName:
    """The kernel whose worst loss against the better one, over all contexts, is the smallest.

    A graph is captured for one size and replayed at any context. A size that was not measured takes
    the choice of the nearest measured size, by the ratios of requests and of rows; of two equally
    near ones the larger decides. Nothing measured is a `ValueError`.
    """
    if not costs:
        raise ValueError("no kernel of tree attention was measured")
    nearest = min({point.size for point in costs}, key=lambda known: _distance(known, size))
    losses: defaultdict[KernelName, float] = defaultdict(float)
    for point, times in costs.items():
        if point.size == nearest:
            best = min(times.values())
            for kernel, time in times.items():
                losses[kernel] = max(losses[kernel], time / best)
    # Ties go to the first name in the alphabet, so that all ranks agree.
    return min(losses, key=lambda kernel: (losses[kernel], kernel))


def _distance(known: Size, size: Size) -> tuple[float, int]:
    ratios = (math.log(a / b) for a, b in zip(known, size))
    return round(sum(map(abs, ratios)), 9), -known.num_reqs * known.rows


@dataclass
class KernelChoice:
    """The kernel for each size of one engine's batches.

    Attributes:
        why: why there is no choice; empty where the measured times decide.
        declined: layer calls that took the Triton kernel although ``flash`` was chosen, outside of
            graphs: requests differ in rows, or the query is not quantized beside an fp8 cache.
    """

    asked: Literal["auto", "triton", "flash"]
    why: str = ""
    costs: Costs = field(default_factory=dict)
    used: dict[Size, KernelName] = field(default_factory=dict)
    declined: int = 0

    def of(self, num_reqs: int, rows: int) -> KernelName:
        """The kernel for a batch of `num_reqs` requests of `rows` rows each; it never changes."""
        size = Size(num_reqs, rows)
        if size not in self.used:
            measured = choose(self.costs, size) if self.costs else "triton"
            self.used[size] = measured if self.asked == "auto" else self.asked
        return self.used[size]

    def report(self) -> dict[str, Any]:
        """Plain values for ``graft_info()``."""
        return {
            "asked": self.asked,
            "why": self.why,
            "microseconds": [
                {**point._asdict(), **{kernel: round(time, 1) for kernel, time in times.items()}}
                for point, times in self.costs.items()
            ],
            "used": {f"{size.num_reqs}x{size.rows}": kernel for size, kernel in self.used.items()},
            "declined": self.declined,
        }

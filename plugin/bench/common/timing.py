"""Clocks and statistics of measurements."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` (0 to 1) of the values do not exceed.

    Raises:
        ValueError: there are no values, or ``share`` is no share.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(f"percentile {share} of {len(values)} values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class Spread:
    """Median and 99th percentile, in the unit of the values."""

    median: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Compute the spread of at least one value."""
        return cls(statistics.median(values), percentile(values, 0.99))


class Deadline:
    """A limit in seconds from now; ``None`` never passes.

    Attributes:
        seconds: the whole limit.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._start = clock()

    @property
    def left(self) -> float:
        """Seconds until the limit; infinite without one, never negative."""
        if self.seconds is None:
            return math.inf
        return max(0.0, self.seconds - (self._clock() - self._start))

    @property
    def passed(self) -> bool:
        """Whether the limit is reached."""
        return self.left == 0

    def share(self, weight: float, others: float) -> Deadline:
        """Limit one of the tasks left: it has ``weight``, the others have ``others`` in all."""
        if self.seconds is None:
            return Deadline(None, self._clock)
        return Deadline(self.left * weight / (weight + others), self._clock)


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    blocks: int,
    per_block: int,
    clock: Callable[[], float] = time.perf_counter,
    deadline: Deadline | None = None,
) -> dict[str, list[float]]:
    """Time every call; blocks of the calls take turns, so that drift affects all of them alike.

    Args:
        calls: the calls to time; each must wait for the device itself.
        blocks: how often the turn goes round; the order is reversed every other time.
        per_block: runs of a call in one turn.
        clock: returns seconds.
        deadline: checked between rounds; the first round is always run.

    Returns:
        Seconds of each run.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for block in range(blocks):
        if block and deadline is not None and deadline.passed:
            break
        for name in names if block % 2 == 0 else reversed(names):
            for _ in range(per_block):
                start = clock()
                calls[name]()
                found[name].append(clock() - start)
    return found

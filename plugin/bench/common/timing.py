"""Clocks and statistics of measurements."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
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

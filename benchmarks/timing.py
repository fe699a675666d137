"""Limits and statistics of measurements."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_graft.bench.common.arm import percentile


@dataclass(frozen=True)
class Spread:
    """Median and 99th percentile, in the unit of the values."""

    median: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), percentile(values, 0.99))


class Deadline:
    """A limit in seconds from now; ``None`` never passes."""

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
        return self.left == 0

"""How long steps take, by when the scheduler made them and when their results came."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class StepClock:
    """Times steps that may overlap, with pauses between them.

    Args:
        clock: seconds, monotonic; tests pass their own.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: deque[tuple[int, float]] = deque(maxlen=64)
        self._last_result = 0.0

    def begin(self, tokens: int) -> None:
        """A step of ``tokens`` tokens was made; 0 for one that tells nothing."""
        self._steps.append((tokens, self._clock()))

    def end(self) -> tuple[int, float]:
        """The results of the oldest step have come.

        Returns:
            Its tokens, and the seconds that it had the device for itself: since it was made, or
            since the step before it ended, whichever is later.
        """
        now = self._clock()
        tokens, begun = self._steps.popleft() if self._steps else (0, now)
        seconds = now - max(begun, self._last_result)
        self._last_result = now
        return tokens, seconds

"""How long steps take, by when the scheduler made them and when their results came."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class StepClock:
    """Times steps that may overlap, with pauses between them.

    Not every step has results to tell of, so that steps are known by their numbers.

    Args:
        clock: seconds, monotonic; tests pass their own.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._number = 0
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=64)
        self._last_result = 0.0

    def begin(self, tokens: int) -> int:
        """A step with a forward pass was made.

        Args:
            tokens: that it computes; 0 if its time tells nothing.

        Returns:
            Its number, from 1.
        """
        self._number += 1
        self._steps.append((self._number, tokens, self._clock()))
        return self._number

    def end(self, number: int) -> tuple[int, float]:
        """The results of a step have come; steps come back in their order.

        Args:
            number: of the step; 0 for one without a forward pass.

        Returns:
            Its tokens, and the seconds that it had the device for itself: since it was made, or
            since the step before it ended, whichever is later.
        """
        now = self._clock()
        while self._steps and self._steps[0][0] < number:
            self._steps.popleft()
        if not self._steps or self._steps[0][0] != number:
            return 0, 0.0
        _, tokens, begun = self._steps.popleft()
        seconds = now - max(begun, self._last_result)
        self._last_result = now
        return tokens, seconds

"""How long steps take, put together from what the scheduler and the ranks know of them."""

from __future__ import annotations

from collections.abc import Mapping


class StepTimes:
    """Steps are known by their numbers, as ranks tell of a step's time only later, or never."""

    def __init__(self) -> None:
        self._number = 0
        self._tokens: dict[int, int] = {}

    def begin(self, tokens: int) -> int:
        """A step with a forward pass was made.

        Args:
            tokens: that it computes; 0 if its time tells nothing.

        Returns:
            Its number, from 1.
        """
        self._number += 1
        if tokens:
            self._tokens[self._number] = tokens
        return self._number

    def ended(self, seconds: Mapping[int, float]) -> list[tuple[int, float]]:
        """Take in seconds by step; returns (tokens, seconds) of those that tell something."""
        known = []
        for number in sorted(seconds):
            # Ranks tell in the steps' order: nobody will tell of those before any more.
            for earlier in [step for step in self._tokens if step < number]:
                del self._tokens[earlier]
            if number in self._tokens:
                known.append((self._tokens.pop(number), seconds[number]))
        return known

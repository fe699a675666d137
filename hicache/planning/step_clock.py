"""Matches the tokens of steps, which the scheduler knows, with their times from the ranks."""

from __future__ import annotations

from collections.abc import Mapping


class StepClock:
    """Numbers steps, because the ranks report the time of a step only later, or never."""

    def __init__(self) -> None:
        self._number = 0
        self._tokens: dict[int, int] = {}

    def begin(self, tokens: int) -> int:
        """Note a step with a forward pass.

        Args:
            tokens: number of tokens that it computes; 0 if its time should be ignored.

        Returns:
            The number of the step. The first is 1.
        """
        self._number += 1
        if tokens:
            self._tokens[self._number] = tokens
        return self._number

    def ended(self, seconds: Mapping[int, float]) -> list[tuple[int, float]]:
        """Take in reported times.

        Args:
            seconds: seconds of each ended step, by its number.

        Returns:
            ``(tokens, seconds)`` of each ended step whose time should not be ignored.
        """
        known = []
        for number in sorted(seconds):
            # Ranks report steps in order, so no earlier step will be reported any more.
            for earlier in [step for step in self._tokens if step < number]:
                del self._tokens[earlier]
            if number in self._tokens:
                known.append((self._tokens.pop(number), seconds[number]))
        return known

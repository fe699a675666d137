"""Choices at random, and values that are spoilt by a misspelt key, a key too many, or junk."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any


class Mutations:
    """Random choices; a subclass seeds them, and says how much care an input takes.

    Attributes:
        random: where all choices come from.
        care: from 0 to 1; an input that takes all of it has no mistakes but those of its values.
    """

    def __init__(self) -> None:
        self.random = random.Random()
        self.care = 0.0

    def _chance(self, share: float) -> bool:
        return self.random.random() < share

    def _slips(self, share: float) -> bool:
        return self._chance(share * (1 - self.care))

    def _pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    def _some(self, share: float = 0.3, **choices: list[Any]) -> dict[Any, Any]:
        """Choose some keys, each with one of its values (or a function's), mostly the first."""
        found = {
            key: self._pick(*values) if self._slips(0.8) else values[0]
            for key, values in choices.items()
            if self._chance(share)
        }
        return {key: value() if callable(value) else value for key, value in found.items()}

    def _spoilt(self, values: Any, share: float = 0.15) -> Any:
        """Return the mapping, or one with a key too many, a misspelt key, or junk as a value."""
        if not isinstance(values, dict) or not self._slips(2 * share):
            return values
        values, known = dict(values), list(values)
        way = self.random.randrange(3)
        if way == 0 or not known:
            values[self._odd_key()] = self._junk()
        elif way == 1:
            key = self._pick(*known)
            values[f"{key}{self._pick('s', '.x', ' ', chr(10))}"] = values.pop(key)
        else:
            values[self._pick(*known)] = self._junk()
        return values

    def _odd_key(self) -> Any:
        odd = [1, None, 2.5, True, (1, 2), b"topk", "", "eagle.topk", "\udc80", "a\0b", "k" * 5000]
        return self._pick(*odd, "fröhlich", "\n\x1b[31m", "topkk", "-1", "__class__")

    def _junk(self, depth: int = 0) -> Any:
        scalars: list[Any] = [None, True, 0, -1, 1 << 62, 1 << 200, 10**5000, 0.5]
        scalars += [float("nan"), -float("inf")]
        scalars += ["", "x", "true", "\0", "\udc80", "\x1b[2J", "x" * 100_000, b"x", 1j, object()]
        scalars += [{1, 2}, Path("x"), range(3), Exception("x"), int, print]
        if depth < 3 and self._chance(0.3):
            return [self._junk(depth + 1) for _ in range(self.random.randrange(3))]
        if depth < 3 and self._chance(0.3):
            return {self._odd_key(): self._junk(depth + 1) for _ in range(self.random.randrange(3))}
        if self._chance(0.05):
            deep: Any = []
            for _ in range(5000):
                deep = [deep]
            return deep
        return self._pick(*scalars)

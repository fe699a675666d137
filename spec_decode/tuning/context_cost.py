"""What a step costs per token of context: learned while serving, from steps that differ in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

_KEPT = 16
"""Recent timings that are kept of one kind of step and one class of contexts."""

_FEW = 6
"""Fewer timings than this say nothing of their class."""

_APART = 2.0
"""Contexts of one kind of step tell a cost only if some are at least this many times longer."""

LARGEST_SHARE = 0.9
"""The most of a step's time that its context may be held responsible for."""

_FEW_TOKENS = 8192.0
"""Where contexts spread over fewer tokens than this, the slope is mostly noise, and is halved or
more (ridge regression)."""

_BEYOND = 2.0
"""A context that is longer than this many times the longest known one counts as if it were not."""

_FIT = 64
"""Timings after which the cost is fitted anew; and whenever a class begins to count."""

_AGE = 20_000
"""Timings after which a class that wasn't seen again is forgotten: the machine may have changed."""


def usual(seconds: Iterable[float]) -> float:
    """The lower quartile of what steps took, since disturbances only make a step longer."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 4]


@dataclass
class _Class:
    """Recent steps of one kind whose contexts are alike, within a factor of 2.

    Attributes:
        seconds: what each took.
        tokens: K/V tokens of each.
        last: when the latest was recorded, in timings.
        usual: lower quartile of the seconds.
        context: mean of the tokens.
    """

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))
    last: int = 0
    usual: float = 0.0
    context: float = 0.0

    def add(self, seconds: float, tokens: int, now: int) -> None:
        """Record a step. Reads are far more frequent, so the numbers are kept."""
        self.seconds.append(seconds)
        self.tokens.append(tokens)
        self.last = now
        self.usual = usual(self.seconds)
        self.context = sum(self.tokens) / len(self.tokens)


class ContextCost:
    """Seconds that any step takes per K/V token of its requests.

    All kinds of steps, that is batch sizes and numbers of nodes, share this one cost: each reads
    every key of the target once. Within a kind, contexts are grouped by powers of two. The cost is
    the slope of a line through the groups' usual times (least squares, an intercept per kind). So
    what kinds cost by themselves doesn't count, a few bad timings don't either, and after the
    traffic has turned to long contexts the short ones are not forgotten.

    The cost is never negative, never so large that a context would take nearly all of a step, and 0
    until one kind of steps was seen with contexts of clearly different lengths.

    Attributes:
        per_token: the cost in seconds.
    """

    def __init__(self) -> None:
        self.per_token = 0.0
        self._longest = 0
        self._kinds: dict[tuple[int, int], dict[int, _Class]] = {}
        self._now = 0

    def of(self, tokens: int) -> float:
        """Seconds that a step takes for its context of so many K/V tokens, of all requests."""
        return self.per_token * min(tokens, _BEYOND * self._longest)

    def observe(self, size: int, nodes: int, tokens: int, seconds: float) -> None:
        """Record a step without prompts.

        Args:
            size: batch size.
            nodes: drafts that each request verified.
            tokens: K/V tokens of all requests.
            seconds: what the step took.
        """
        if tokens <= 0:
            return
        self._now += 1
        self._longest = max(self._longest, tokens)
        classes = self._kinds.setdefault((size, nodes), {})
        timings = classes.setdefault(tokens.bit_length(), _Class())
        timings.add(seconds, tokens, self._now)
        if self._now % _FIT == 0 or len(timings.seconds) == _FEW:
            self._fit()

    def _fit(self) -> None:
        """Fit the slope to all kinds that tell one; keep the last where none does any more."""
        rise = spread = 0.0
        steepest = float("inf")
        for classes in self._kinds.values():
            points = [
                (each.context, each.usual)
                for each in classes.values()
                if len(each.seconds) >= _FEW and self._now - each.last < _AGE
            ]
            if len(points) < 2 or max(points)[0] < _APART * min(points)[0]:
                continue
            middle = sum(tokens for tokens, _ in points) / len(points)
            rise += sum((tokens - middle) * seconds for tokens, seconds in points)
            spread += sum((tokens - middle) ** 2 for tokens, _ in points)
            bounds = (LARGEST_SHARE * seconds / tokens for tokens, seconds in points)
            steepest = min(steepest, *bounds)
        if spread > 0:
            self.per_token = min(max(rise / (spread + _FEW_TOKENS**2), 0.0), steepest)

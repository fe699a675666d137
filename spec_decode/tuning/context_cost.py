"""The cost of a step per token of context: learned while serving, from steps that differ in it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_KEPT = 16
"""Recent timings of one kind of step and one class of contexts."""

_FEW = 6
"""Fewer timings than this say nothing of their class."""

_APART = 2.0
"""Contexts of one kind of step tell a cost only if some are at least this many times longer."""

LARGEST_SHARE = 0.9
"""The most of a step's time that its context may be held responsible for."""

_FEW_TOKENS = 8192.0
"""Spread of contexts, in tokens, below which half of the slope or more is noise (ridge)."""

_FEW_ROWS = 16
"""Rows by which so few tokens must differ likewise for the cost of rows. An H100 multiplies a token
in FP8 with about so many rows in the time that reading it takes."""

_MEASURED = 1 / 16
"""Weight of what steps take beyond measured costs, which have four times the errors of timings."""

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
    """Recent steps of one kind whose contexts are alike, within a factor of 2: seconds, K/V tokens,
    when the latest was recorded (in timings), lower quartile of the seconds, mean of the tokens."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))
    last: int = 0
    usual: float = 0.0
    context: float = 0.0

    def add(self, seconds: float, tokens: int, now: int) -> None:
        self.seconds.append(seconds)
        self.tokens.append(tokens)
        self.last = now
        self.usual = usual(self.seconds)
        self.context = sum(self.tokens) / len(self.tokens)


class Rates(NamedTuple):
    """Seconds that a step takes per K/V token: for reading it, and more for each row of its
    request, the root among them."""

    token: float = 0.0
    row: float = 0.0

    def of(self, nodes: int) -> float:
        return self.token + self.row * (nodes + 1)


class _Point(NamedTuple):
    """Steps of one kind whose contexts are alike: mean K/V tokens, these times the rows of a
    request, what such steps usually take, and that or what they take beyond the measured cost."""

    tokens: float
    products: float
    whole: float
    seconds: float


class _Sums(NamedTuple):
    """Sums over groups of points of products of differences to the group's means; ``rise`` is with
    the seconds, ``both`` of tokens with products."""

    tokens: float
    both: float
    products: float
    token_rise: float
    product_rise: float

    @classmethod
    def of(cls, groups: Sequence[Sequence[_Point]], weight: float = 1.0) -> _Sums:
        tokens = both = products = token_rise = product_rise = 0.0
        for points in groups:
            token = sum(point[0] for point in points) / len(points)
            product = sum(point[1] for point in points) / len(points)
            for each, rows, _, seconds in points:
                x, y = each - token, rows - product
                tokens += x * x
                both += x * y
                products += y * y
                token_rise += x * seconds
                product_rise += y * seconds
        sums = tokens, both, products, token_rise, product_rise
        return cls(*(weight * each for each in sums))

    def beside(self, token: float, rows: float) -> tuple[float, float]:
        """Sums for a line through what a cost per token, with the mean number of rows, leaves over:
        over squares of places, and over places times the seconds left.

        A place is a point's products less those that its tokens have with the mean rows.
        """
        spread = self.products - rows * (2 * self.both - rows * self.tokens)
        rise = self.product_rise - rows * self.token_rise
        return spread, rise - token * (self.both - rows * self.tokens)


def _fitted(kinds: _Sums, sizes: _Sums) -> Rates:
    """The rates that groups tell: what a token costs with the mean rows, then what rows cost."""

    def of_row(token: float, rows: float) -> float:
        pairs = kinds.beside(token, rows), sizes.beside(token, rows)
        spread, rise = map(sum, zip(*pairs, strict=True))
        return max(rise / (spread + (_FEW_ROWS * _FEW_TOKENS) ** 2), 0.0)

    spread = kinds.tokens + _FEW_TOKENS**2
    token, rows = max(kinds.token_rise / spread, 0.0), kinds.both / spread
    row = of_row(token, rows)
    if row * rows > token:
        # Nothing is left for reading.
        return Rates(0.0, of_row(0.0, 0.0))
    return Rates(token - row * rows, row)


class ContextCost:
    """Seconds that any step takes per K/V token of its requests.

    Reading a token costs the same in all kinds of steps (batch sizes and numbers of nodes), and
    multiplying with it costs the more, the more rows its request has: all kinds share two `Rates`.
    Within a kind, contexts are grouped by powers of two. A line through the groups' usual times
    (least squares, an intercept per kind) tells what a token costs with the mean rows, and a second
    one through what that leaves over tells what rows cost. So neither what kinds cost by themselves
    nor a few bad timings count, and short contexts are not forgotten.

    Where all contexts are long, numbers of nodes of one batch size tell what rows cost, by what
    they take beyond their measured costs. Those may be wrong, so this counts for little unless
    tokens are many. The cost is never negative, never nearly all of a step, never grows faster than
    the rows, and is 0 until steps differ in one of the two ways.
    """

    def __init__(self) -> None:
        self.rates = Rates()
        self._longest = 0
        self._kinds: dict[tuple[int, int], dict[int, _Class]] = {}
        self._measured: dict[tuple[int, int], float | None] = {}
        self._now = 0

    def of(self, tokens: int, nodes: int) -> float:
        """Seconds that a step takes for so many K/V tokens of all its requests."""
        return self.rates.of(nodes) * min(tokens, _BEYOND * self._longest)

    def observe(
        self, size: int, nodes: int, tokens: int, seconds: float, measured: float | None = None
    ) -> None:
        """Record a step without prompts over so many K/V tokens of all requests.

        `measured` are the seconds over short contexts that were measured at the start; None if they
        were not, or don't tell what nodes cost.
        """
        if tokens <= 0:
            return
        self._now += 1
        self._longest = max(self._longest, tokens)
        self._measured[size, nodes] = measured
        classes = self._kinds.setdefault((size, nodes), {})
        timings = classes.setdefault(tokens.bit_length(), _Class())
        timings.add(seconds, tokens, self._now)
        if self._now % _FIT == 0 or len(timings.seconds) == _FEW:
            self._fit()

    def _fit(self) -> None:
        """Fit the rates to all points that tell them; keep the last where none does any more."""
        kinds, sizes = self._groups()
        if not kinds and not sizes:
            return
        token, row = _fitted(_Sums.of(kinds), _Sums.of(sizes, _MEASURED))
        largest = max(
            (token * tokens + row * products) / whole
            for tokens, products, whole, _ in itertools.chain(*kinds, *sizes)
        )
        less = LARGEST_SHARE / max(LARGEST_SHARE, largest)
        self.rates = Rates(less * token, less * row)

    def _groups(self) -> tuple[list[list[_Point]], list[list[_Point]]]:
        """Points to compare: those of one kind with contexts that differ clearly; and those of one
        batch size with contexts that are alike, which take no less than their measured costs."""
        kinds: list[list[_Point]] = []
        sizes: dict[tuple[int, int], list[_Point]] = {}
        for (size, nodes), classes in self._kinds.items():
            group, cost = [], self._measured[size, nodes]
            for length, each in classes.items():
                if len(each.seconds) < _FEW or self._now - each.last >= _AGE:
                    continue
                products, took = each.context * (nodes + 1), each.usual
                group.append(_Point(each.context, products, took, took))
                if cost is not None and took > cost:
                    beyond = _Point(each.context, products, took, took - cost)
                    sizes.setdefault((size, length), []).append(beyond)
            tokens = [each.tokens for each in group]
            if len(group) > 1 and max(tokens) >= _APART * min(tokens):
                kinds.append(group)
        return kinds, [group for group in sizes.values() if len(group) > 1]

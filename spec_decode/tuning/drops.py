"""The price of a node's experts, by which the device drops nodes, and whether dropping pays.

Rows that ask for any k of E experts read ``E * (1 - (1 - k / E) ** rows)`` of them. What all of
these cost is told by the steps that were measured at the start, over random tokens. Rows of a text
are more alike, and a draft's probabilities may be wrong. So steps of both kinds are compared while
serving."""

import math
from collections import defaultdict
from dataclasses import dataclass

from vllm_graft.spec_decode.tuning.step_times import Costs

PRICE = "vllm_graft_price"
"""The attribute of a ``SchedulerOutput`` with the price of the nodes that its step drafts."""

Price = tuple[float, float]
"""See ``DropState.price``."""

KEEP_ALL: Price = (0.0, 0.0)

TRIES = 8
"""Blocks of steps of which one is of the other kind. Raised, what is wrong is found later."""

BELIEVED = 48.0
"""Steps of each kind before they are compared. Raised, chance decides less often."""

MARGIN = 0.03
"""Part by which steps that keep all nodes must yield more before these are kept."""

_MEMORY = 1000.0
"""Steps of one kind after which one counts for 1/e."""


@dataclass
class _Yield:
    """Tokens of a request, and seconds, of recent steps of one kind."""

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        fading = math.exp(-1 / _MEMORY)
        self.steps = self.steps * fading + 1
        self.tokens = self.tokens * fading + tokens
        self.seconds = self.seconds * fading + seconds


class Drops:
    """Prices of nodes, and when to ask them. `share`: the part of all experts that a row reads."""

    def __init__(self, share: float) -> None:
        self._log = math.log1p(-min(share, 0.999))
        self._seconds = 0.0
        self._yields: defaultdict[tuple[int, bool], _Yield] = defaultdict(_Yield)
        self._blocks: defaultdict[int, int] = defaultdict(int)

    def seed(self, costs: Costs) -> None:
        """Learn what all experts cost from measured steps."""
        self._seconds = expert_seconds(costs, self._log)

    def begin_block(self, size: int) -> bool:
        """Whether the next steps of a batch size drop nodes."""
        self._blocks[size] += 1
        dropped, whole = self._yields[size, True], self._yields[size, False]
        pays = True
        if min(dropped.steps, whole.steps) >= BELIEVED:
            gain = dropped.tokens * whole.seconds / (whole.tokens * dropped.seconds)
            pays = gain > 1 - MARGIN
        return pays != (self._blocks[size] % TRIES == 0)

    def observe(self, size: int, tokens: float, seconds: float, *, dropped: bool) -> None:
        """Learn from a step in which each request got so many tokens on average."""
        self._yields[size, dropped].add(tokens, seconds)

    def price(self, batch: int, pace: float) -> Price:
        """The price of nodes where each of `batch` requests gets `pace` tokens per second. All are
        taken to keep as many, so that the later of a request's nodes read fewer new experts."""
        decay = batch * self._log
        return pace * self._seconds * math.exp(decay), decay


def expert_seconds(costs: Costs, log: float) -> float:
    """Seconds that all experts take: least squares over steps of the same number of nodes, whose
    drafts take as long, by the rows and the part of the experts that they read. `log`: that of the
    part of the experts that a row does not read."""
    uu = ur = rr = us = rs = 0.0
    for nodes, times in costs.items():
        weights = [seconds**-2 for seconds in times.values()]
        rows = [float(count * (nodes + 1)) for count in times]
        columns = [-math.expm1(log * each) for each in rows], rows, [*times.values()]
        u, r, s = (_centred(column, weights) for column in columns)
        for w, x, y, z in zip(weights, u, r, s):
            uu, ur, rr = uu + w * x * x, ur + w * x * y, rr + w * y * y
            us, rs = us + w * x * z, rs + w * y * z
    free = uu * rr - ur * ur
    if free <= 1e-9 * uu * rr:
        return 0.0
    if (us * ur - rs * uu) > 0:  # A row would cost less than nothing.
        return max(us / uu, 0.0)
    return max((us * rr - rs * ur) / free, 0.0)


def _centred(column: list[float], weights: list[float]) -> list[float]:
    mean = sum(w * each for w, each in zip(weights, column)) / sum(weights)
    return [each - mean for each in column]


def price_of(output: object) -> Price:
    """The price of the nodes that a step drafts."""
    found: Price = getattr(output, PRICE, KEEP_ALL)
    return found

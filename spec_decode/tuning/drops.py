"""The price of a node's experts, by which the device drops nodes, and whether dropping pays.

Rows that ask for any k of E experts read ``E * (1 - (1 - k / E) ** rows)`` of them. What all of
these cost is told by the steps that were measured at the start, over random tokens. Rows of a text
are more alike, and a draft's probabilities may be wrong. So what yields more is found by trying:
trees that keep all nodes, in the number that the tuner chooses, and trees of several numbers that
drop some."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_graft.spec_decode.tuning.step_times import Costs

PRICE = "vllm_graft_price"
"""The attribute of a ``SchedulerOutput`` with the price of the nodes that its step drafts."""

Price = tuple[float, float]
"""See ``DropState.price``."""

KEEP_ALL: Price = (0.0, 0.0)

HELD = 4
"""Choices of the tuner for which one of its ways is held. Raised, more steps are timed, and what is
better is found later."""

NUMBERS = 4
"""Numbers of nodes, from the tuner's choice on, of which trees that drop nodes are tried."""

DOUBT = 0.7
"""Relative standard deviation of a request's tokens in a step. Raised, more is tried."""

_MEMORY = 2000.0
"""Steps after which one counts for 1/e."""


@dataclass
class _Yield:
    """Tokens of requests, trees and seconds times requests, of recent steps of one way."""

    trees: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def hope(self) -> float:
        """The rate, as high as it may be; 0 of what was held and could not be timed."""
        return self.rate * (1 + DOUBT / math.sqrt(self.trees)) if self.seconds else 0.0


@dataclass
class _Size:
    """What is known of a batch size: yields by the number of nodes of trees that drop some, and of
    those that keep all (None); the ways that were compared last; the tuner's latest choice; the way
    that is held, and how long."""

    yields: dict[int | None, _Yield] = field(default_factory=dict)
    ways: Sequence[int | None] = (None,)
    choice: int = 0
    held: int | None = None
    left: int = 0


class Drops:
    """Prices of nodes, and when to ask them. `share`: the part of all experts that a row reads."""

    def __init__(self, share: float) -> None:
        self._log = math.log1p(-min(share, 0.999))
        self._seconds = 0.0
        self._sizes: dict[int, _Size] = {}

    def seed(self, costs: Costs) -> None:
        """Learn what all experts cost from measured steps."""
        self._seconds = expert_seconds(costs, self._log)

    def nodes(self, size: int, allowed: Sequence[int]) -> int | None:
        """How many nodes the next trees of a batch size have, of which some are dropped; None for
        the tuner's choice, of which none is. `allowed`: numbers to choose from, ascending."""
        known = self._sizes.setdefault(size, _Size())
        known.left -= 1
        if known.left <= 0 or (known.held is not None and known.held not in allowed):
            numbers = [nodes for nodes in allowed if nodes and nodes >= known.choice][:NUMBERS]
            known.ways = [None, *(numbers if self._seconds else ())]
            hopes = {
                way: known.yields[way].hope if way in known.yields else math.inf
                for way in known.ways
            }
            known.held, known.left = max(hopes, key=hopes.__getitem__), HELD
            known.yields.setdefault(known.held, _Yield())
        return known.held

    def observe(
        self, size: int, nodes: int, tokens: Sequence[int], seconds: float, *, dropped: bool
    ) -> None:
        """Learn from the tokens of each request of a step with so many nodes."""
        known = self._sizes.setdefault(size, _Size())
        known.choice = known.choice if dropped else nodes
        fading = math.exp(-1 / _MEMORY)
        # Steps are timed again, so that what could not be timed is tried again.
        known.yields = {way: each for way, each in known.yields.items() if each.seconds}
        for each in known.yields.values():
            each.trees, each.tokens = fading * each.trees, fading * each.tokens
            each.seconds *= fading
        found = known.yields.setdefault(nodes if dropped else None, _Yield())
        found.trees += len(tokens)
        found.tokens += sum(tokens)
        found.seconds += len(tokens) * seconds

    def price(self, size: int, batch: int) -> Price:
        """The price of nodes in a batch that yields as much as its best way. All requests are taken
        to keep as many, so that the later of a request's nodes read fewer new experts."""
        known = self._sizes[size]
        # Of other ways nobody knows what they yield by now.
        found = (each.rate for way, each in known.yields.items() if way in known.ways)
        pace = max(found, default=0.0)
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

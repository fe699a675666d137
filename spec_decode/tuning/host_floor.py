"""Steps that take the host's time, because the device has less to do than the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_ADDED = 0.25
"""The most of a measured cost that the device may take besides, where only one cost was timed.

What is left out of the measured costs, the sampler above all, is a tenth of a step of an 8B model.
"""

_CLEAR = 0.25
"""Part of a measured cost by which a step must be longer than expected for the host to be blamed.

A step of an 8B model is never so much longer, so that its times are corrected as if there were no
host (tests/spec_decode/tuning/test_tuner_moe.py has its choices)."""

_APART = 1.2
"""Measured costs of which one is so many times the other tell the host's time from the device's."""

_ALIKE = 1.1
"""Steps that the host bounds take about as long. One that takes more than so many times the least
was disturbed, or has another reason."""


class Timed(NamedTuple):
    """One number of nodes that was timed.

    Attributes:
        weight: how much its timings are believed, below 1.
        cost: seconds that were measured at the start.
        beyond: seconds that its steps usually take besides.
    """

    weight: float
    cost: float
    beyond: float

    @property
    def seconds(self) -> float:
        """What its steps usually take."""
        return self.cost + self.beyond


class Floor(NamedTuple):
    """The least time of a step, which is the host's.

    The device works on one step while the host prepares the next one, so that a step takes the
    longer of both times. More nodes cost nothing then, until the device takes longer.

    Attributes:
        added: seconds beyond its cost that a step takes where the device is slower.
        seconds: the least time of a step; 0 if the device is slower in all steps that were timed.
    """

    added: float = 0.0
    seconds: float = 0.0

    @classmethod
    def under(cls, timed: Sequence[Timed]) -> Floor:
        """What the timed numbers of nodes of one batch size tell.

        No step takes less than its cost and what the device does besides. So the number that takes
        least beyond its cost tells the latter, and the host bounds those that take clearly more,
        if no other takes less.
        With one number, or costs that are alike, nothing tells them apart: what takes far more
        than its cost is taken for the host's, so that more nodes are tried, which tells.
        """
        if not timed:
            return cls()
        costs = [each.cost for each in timed]
        least = max(0.0, min(each.beyond for each in timed))
        if max(costs) < _APART * min(costs):
            least = min(least, _ADDED * max(costs))
        shortest = min(each.seconds for each in timed)
        bound = [
            each
            for each in timed
            if each.beyond > least + _CLEAR * each.cost and each.seconds <= _ALIKE * shortest
        ]
        if not bound:
            return cls()
        total = sum(each.weight for each in bound)
        return cls(least, sum(each.weight * each.seconds for each in bound) / total)

    def beyond(self, cost: float) -> float:
        """Seconds that a step takes beyond its measured cost."""
        return max(self.added, self.seconds - cost)

    def mean_beyond(self, timed: Sequence[Timed]) -> float:
        """The mean of `beyond` over numbers that were timed, often timed ones weighing most."""
        total = sum(each.weight for each in timed)
        return sum(each.weight * self.beyond(each.cost) for each in timed) / total

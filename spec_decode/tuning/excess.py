"""Time of steps beyond the costs measured at the start, as timed numbers of nodes tell it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_DOUBT = 0.05
"""Weight at which the shared excess counts half; it is reached after about three timings."""

_SLOPE_DOUBT = 0.05
"""Spread (see `Slope`) at which half of a slope is believed; one block of a number half or twice as
large as the other has 0.07. With a far larger one a block corrects too little."""

_ADDED = 0.25
"""The most of a measured cost that the device may take besides, where only one cost was timed. The
sampler above all is not measured: a tenth of a step of an 8B model."""

_CLEAR = 0.25
"""Part of a measured cost by which a step must be longer than expected for the host to be blamed.
A step of an 8B model never is, so that its times are corrected as if there were no host."""

_APART = 1.2
"""Measured costs of which one is so many times the other tell the host's time from the device's."""

_ALIKE = 1.1
"""Steps that the host bounds take about as long. One that takes more than so many times the least
was disturbed, or has another reason."""


class Point(NamedTuple):
    """One number of nodes that was timed: how much its timings are believed (below 1), its
    `place_of`, and what its steps usually take beyond the measured cost."""

    weight: float
    place: float
    seconds: float


def place_of(nodes: int) -> float:
    """The place of a number of nodes on the line, on which each doubling of the rows is as long."""
    return math.log2(nodes + 1)


def level(points: Sequence[Point]) -> float:
    """Seconds that all numbers share: their mean, and less if little is known."""
    total = sum(point.weight for point in points) + _DOUBT
    return sum(point.weight * point.seconds for point in points) / total


class Slope(NamedTuple):
    """Growth of the excess with the nodes (ridge regression): the points' mean place, the weighted
    sum of their squared distances from it (0 for a single number), and seconds per place."""

    middle: float = 0.0
    spread: float = 0.0
    rise: float = 0.0

    @classmethod
    def through(cls, points: Sequence[Point]) -> Slope:
        total = sum(point.weight for point in points)
        if not total:
            return cls()
        middle = sum(point.weight * point.place for point in points) / total
        spread = sum(point.weight * (point.place - middle) ** 2 for point in points)
        rise = sum(point.weight * (point.place - middle) * point.seconds for point in points)
        return cls(middle, spread, rise / (spread + _SLOPE_DOUBT))


class Timed(NamedTuple):
    """One number of nodes that was timed: how much it is believed (below 1), the cost that was
    measured at the start, and what its steps usually take besides."""

    weight: float
    cost: float
    beyond: float

    @property
    def seconds(self) -> float:
        return self.cost + self.beyond


class Floor(NamedTuple):
    """The least time of a step, which is the host's, as the device works on one step while the host
    prepares the next one. More nodes cost nothing until the device takes longer.

    Attributes:
        added: seconds beyond its cost that a step takes where the device is slower.
        seconds: the least time of a step; 0 if the device is slower in all steps that were timed.
    """

    added: float = 0.0
    seconds: float = 0.0

    @classmethod
    def under(cls, timed: Sequence[Timed]) -> Floor:
        """The floor that the timed numbers of nodes of one batch size tell.

        No step takes less than its cost and what the device does besides. So the number that takes
        least beyond its cost tells the latter, and the host bounds those that take clearly more, if
        no other takes less. With one number, or costs that are alike, what takes far more than its
        cost is taken for the host's, so that more nodes are tried, which tells.
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

"""What steps take beyond the costs measured at the start, as timed numbers of nodes tell it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_DOUBT = 0.05
"""Weight at which the shared excess counts half; it is reached after about three timings."""

_SLOPE_DOUBT = 0.05
"""Spread (see `Slope`) at which half of a slope is believed.

One block of a number half or twice as large as the other has 0.07. Simulated, 0.02 to 0.05 are
about alike, and with 0.5 a block corrects too little."""


class Point(NamedTuple):
    """One number of nodes that was timed.

    Attributes:
        weight: how much its timings are believed, below 1.
        place: where the number lies on the line, see `place_of`.
        seconds: what its steps usually take beyond the measured cost.
    """

    weight: float
    place: float
    seconds: float


def place_of(nodes: int) -> float:
    """Where a number of nodes lies on the line, on which each doubling of the rows is as long."""
    return math.log2(nodes + 1)


def level(points: Sequence[Point]) -> float:
    """Seconds that all numbers share: their mean, and less if little is known."""
    total = sum(point.weight for point in points) + _DOUBT
    return sum(point.weight * point.seconds for point in points) / total


class Slope(NamedTuple):
    """How the excess grows with the nodes.

    Attributes:
        middle: the points' mean place.
        spread: sum of their squared distances from it, each times its weight; 0 if only one
            number was timed.
        rise: seconds per place (ridge regression).
    """

    middle: float = 0.0
    spread: float = 0.0
    rise: float = 0.0

    @classmethod
    def through(cls, points: Sequence[Point]) -> Slope:
        """The slope of a line through points."""
        total = sum(point.weight for point in points)
        if not total:
            return cls()
        middle = sum(point.weight * point.place for point in points) / total
        spread = sum(point.weight * (point.place - middle) ** 2 for point in points)
        rise = sum(point.weight * (point.place - middle) * point.seconds for point in points)
        return cls(middle, spread, rise / (spread + _SLOPE_DOUBT))

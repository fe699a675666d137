from __future__ import annotations

import random

import numpy as np
import pytest

from vllm_graft.spec_decode.tuning.excess import Point, Slope, level, place_of


def random_points(count: int, seed: int = 0) -> list[Point]:
    rng = random.Random(seed)
    return [Point(rng.random(), rng.uniform(1, 6), rng.gauss(0, 1)) for _ in range(count)]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_slope_is_ridge_regression(count: int) -> None:
    points = random_points(count)
    weights, places, seconds = map(np.array, zip(*points))
    found = Slope.through(points)
    middle = np.average(places, weights=weights)
    # Least squares of the centred points, with one more row that pulls the slope to 0.
    rows = np.append(np.sqrt(weights) * (places - middle), np.sqrt(0.05))
    wanted = np.append(np.sqrt(weights) * seconds, 0.0)
    [slope], *_ = np.linalg.lstsq(rows[:, None], wanted, rcond=None)
    assert found.middle == pytest.approx(middle)
    assert found.rise == pytest.approx(slope)
    assert found.spread == pytest.approx(np.sum(weights * (places - middle) ** 2))
    assert level(points) == pytest.approx(np.dot(weights, seconds) / (weights.sum() + 0.05))


def test_one_number_has_no_slope_and_none_has_no_excess() -> None:
    one = [Point(0.5, place_of(7), 2.0)]
    assert Slope.through(one) == Slope(middle=3.0, spread=0.0, rise=0.0)
    assert level(one) == pytest.approx(2.0 * 0.5 / 0.55)
    assert Slope.through([]) == Slope()
    assert level([]) == 0.0

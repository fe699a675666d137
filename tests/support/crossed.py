"""Combinations of parameters, most of which only a nightly run tests."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def crossed(*axes: Sequence[Any], every: int = 2) -> list[Any]:
    """The combinations of the axes' values, of which one of `every` so many is tested each time.

    Each value is, and so is each pair of values if there is a third axis; all have `every` values.
    """
    return [
        pytest.param(
            *(value for _, value in places),
            id="-".join(str(value) for _, value in places),
            marks=() if sum(place for place, _ in places) % every == 0 else pytest.mark.nightly,
        )
        for places in product(*map(enumerate, axes))
    ]

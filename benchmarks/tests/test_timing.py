"""Limits and spreads of measurements."""

from __future__ import annotations

from benchmarks import timing


class Clock:
    """A clock that advances when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_spread() -> None:
    assert timing.Spread.of([3.0, 1.0, 2.0]) == timing.Spread(2.0, 3.0)


def test_a_deadline() -> None:
    clock = Clock()
    deadline = timing.Deadline(10, clock)
    clock.now = 4
    assert deadline.left == 6
    assert not deadline.passed
    clock.now = 11
    assert deadline.left == 0
    assert not timing.Deadline(None).passed

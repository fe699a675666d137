"""The time that a benchmark has, on a clock that stands still between measurements."""

from __future__ import annotations

import pytest

from vllm_graft.bench.common import report
from vllm_graft.bench.common.report import TimeLimit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(report, "time", clock)
    return clock


def taken(limit: TimeLimit, clock: Clock, seconds: float, cases: int = 4) -> int:
    count = 0
    for _ in limit.within(range(cases)):
        clock.now += seconds
        count += 1
    return count


def test_nothing_begins_that_would_end_too_late(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert taken(TimeLimit(35), clock, 10) == 3
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "1 of 4 measured: about 30 s left"
    assert said[-1] == "no time left for 1 of 4 measurements"
    assert taken(TimeLimit(None), clock, 10) == 4
    assert taken(TimeLimit(40), clock, 10) == 4


def test_one_measurement_is_made_however_little_time_there_is(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = TimeLimit(0.5, engines=2)
    clock.now += 40  # The engine's start.
    assert taken(limit, clock, 10) == 1
    assert "no time left for 3 of 4 measurements" in capsys.readouterr().err
    assert taken(limit, clock, 10) == 0


def test_rounds_are_fewer_where_time_is_short(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    def rounds(seconds: float | None, least: int) -> list[int]:
        found, limit = [], TimeLimit(seconds)
        for number in limit.rounds(5, least):
            clock.now += 10
            found.append(number)
        return found

    assert rounds(35, 2) == [0, 1, 2]
    assert capsys.readouterr().err == "no time left for 2 of 5 rounds\n"
    assert rounds(1, 2) == [0, 1]
    assert rounds(None, 2) == rounds(50, 2) == [0, 1, 2, 3, 4]


def test_engines_that_follow_each_other_share_the_time(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = TimeLimit(60, engines=2)
    assert taken(limit, clock, 10) == 3
    assert "1 of 4 measured, 1 more engines: about 70 s left" in capsys.readouterr().err
    # The second has all that is left, as its start took none of it.
    assert taken(limit, clock, 10) == 3
    assert taken(TimeLimit(6000), clock, 100, 2) == 2
    assert "1 of 2 measured: about 2 min left" in capsys.readouterr().err

"""The tuner where measured costs are wrong: rows ask for experts, engines start beside others."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest

from tests.support.worlds.wrong_costs import World, dense, experts, far, qwen, shares
from vllm_graft.spec_decode.tuning import step_times
from vllm_graft.spec_decode.tuning.shapes import DENSE, NARROW, Ladder
from vllm_graft.spec_decode.tuning.step_times import Shared
from vllm_graft.spec_decode.tuning.trials import Trials
from vllm_graft.spec_decode.tuning.tuner import NodeTuner

FLAT = 0.06
"""Part of what nodes cost that is told, where measured rows all ask for the same experts."""


def mean(slope: float, batch: int, *, known: bool = True, ladder: Ladder = NARROW) -> float:
    """Return the mean over texts and prompts of the throughput over that of the best number."""
    return statistics.mean(
        shares(experts(text, batch, slope, ladder=ladder, beside=beside, known=known), (500,), 0)[0]
        for text in ("usual", "easy")
        for beside in (0.0, 0.3)
    )


# A dense head of a target with experts has the dense ladder.
@pytest.mark.parametrize(("batch", "ladder"), [(1, NARROW), (4, NARROW), (4, DENSE)])
def test_costs_that_hide_what_a_node_costs_are_corrected(batch: int, ladder: Ladder) -> None:
    found = mean(FLAT, batch, ladder=ladder)
    assert found > 0.9
    # Without experts it trusts the costs but for a constant.
    assert found > mean(FLAT, batch, known=False, ladder=ladder) + 0.04


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("slope", [1.0, 2.0])
def test_costs_that_are_right_or_too_steep(batch: int, slope: float) -> None:
    assert mean(slope, batch) > 0.94


def test_a_slope_corrects_numbers_that_were_not_timed() -> None:
    found, of = mean(FLAT, 1), Shared.of
    with mock.patch.object(Shared, "of", lambda points, **_: of(points)):
        # Each number that was tried has its own cost mended, and the others keep theirs.
        assert mean(FLAT, 1) < found - 0.01
        with mock.patch.object(Shared, "own", return_value=(0.0, False)):
            assert mean(FLAT, 1) < found - 0.04


STEPS = (500, 1500)
SEEDS = range(3)


def late(world: Callable[[int], World]) -> list[float]:
    """Return the shares of the best number's throughput after 500 steps, one per seed.

    Contexts are not told: what rows seem to cost over them would correct costs that are too low.
    """
    return [shares(replace(world(seed), context=0), STEPS, seed)[-1] for seed in SEEDS]


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(lambda seed: qwen(16, right=False), id="as measured beside other engines"),
        *(
            pytest.param(
                lambda seed, bounds=bounds: dense("1", 16).times(*bounds, seed),
                id=name,
                marks=pytest.mark.nightly,
            )
            for name, bounds in (("too high", (1, 4)), ("too low", (0.5, 1)))
        ),
    ],
)
def test_wrong_costs_are_found_out(
    monkeypatch: pytest.MonkeyPatch, world: Callable[[int], World]
) -> None:
    found = late(world)
    assert statistics.median(found) > 0.95
    assert min(found) > 0.9
    # Control: without trials nothing corrects a number that is never chosen.
    monkeypatch.setattr(Trials, "rival", lambda *_: None)
    assert statistics.mean(late(world)) < statistics.mean(found) - 0.02


@pytest.mark.parametrize("batch", [4, pytest.param(16, marks=pytest.mark.nightly)])
def test_right_costs_lose_little(batch: int) -> None:
    found = [shares(qwen(batch, right=True), STEPS, seed) for seed in SEEDS]
    assert min(map(statistics.mean, found)) > 0.98


def far_loops(monkeypatch: pytest.MonkeyPatch, steps: int, *, near: bool) -> tuple[float, int]:
    """Return the mean share of five loops with contexts of 33k tokens, and steps of 63 nodes."""
    chosen: list[int] = []
    with monkeypatch.context() as patch:
        begin_step = NodeTuner.begin_step

        def recorded(tuner: NodeTuner, batch: int) -> int:
            chosen.append(begin_step(tuner, batch))
            return chosen[-1]

        patch.setattr(NodeTuner, "begin_step", recorded)
        found = [shares(far(near=near), (steps,), seed)[0] for seed in range(5)]
    return statistics.mean(found), chosen.count(63)


def test_contexts_that_cost_more_with_more_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """63 nodes seem to be the best where contexts cost all numbers alike, and are the worst."""
    share, many = far_loops(monkeypatch, 100, near=False)
    mixed, _ = far_loops(monkeypatch, 500, near=True)
    assert share > 0.9
    assert mixed > 0.965
    # Control: rows cost nothing.
    monkeypatch.setattr(step_times, "ROWS", 1e9)
    blind, too_many = far_loops(monkeypatch, 100, near=False)
    assert blind < share - 0.015
    assert too_many > 1.2 * many
    assert far_loops(monkeypatch, 500, near=True)[0] < mixed - 0.01


def test_contexts_that_cost_all_nodes_alike_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def share() -> float:
        return statistics.mean(
            shares(far(rows=False, near=True), (1000,), seed)[0] for seed in range(5)
        )

    found = share()
    assert found > 0.97
    monkeypatch.setattr(step_times, "ROWS", 1e9)
    assert found > share() - 0.01

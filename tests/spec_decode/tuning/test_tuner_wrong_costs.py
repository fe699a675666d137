"""The tuner finds its way where costs that were measured at the start are wrong."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.worlds.wrong_costs import World, dense, far, qwen, shares
from vllm_graft.spec_decode.tuning.trials import Trials
from vllm_graft.spec_decode.tuning.tuner import NodeTuner

STEPS = (500, 1500)
SEEDS = range(3)

BESIDE = "vllm_graft.spec_decode.tuning.context_cost._Sums.beside"
"""Tells what rows cost over contexts."""


def late(world: Callable[[int], World]) -> list[float]:
    """Return the shares of the best number's throughput after 500 steps, one per seed.

    Contexts are not told: what rows seem to cost over them would correct costs that are too low.
    """
    return [shares(replace(world(seed), context=0), STEPS, seed)[-1] for seed in SEEDS]


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(lambda seed: qwen(16, right=False), id="as measured beside other engines"),
        pytest.param(lambda seed: dense("1", 16).times(1, 4, seed), id="too high"),
        pytest.param(lambda seed: dense("1", 16).times(0.5, 1, seed), id="too low"),
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


@pytest.mark.parametrize("batch", [4, 16])
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
    monkeypatch.setattr(BESIDE, lambda *_: (0.0, 0.0))
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
    monkeypatch.setattr(BESIDE, lambda *_: (0.0, 0.0))
    assert found > share() - 0.01

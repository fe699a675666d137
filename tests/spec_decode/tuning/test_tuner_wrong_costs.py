"""The tuner finds its way where costs that were measured at the start are wrong."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from tests.support.wrong_costs import World, dense, qwen, shares
from vllm_graft.spec_decode.tuning.trials import Trials

STEPS = (500, 1500)
SEEDS = range(3)


def late(world: Callable[[int], World]) -> list[float]:
    """Return the shares of the best number's throughput after 500 steps, one per seed."""
    return [shares(world(seed), STEPS, seed)[-1] for seed in SEEDS]


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

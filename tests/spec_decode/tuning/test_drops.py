"""What nodes of experts cost, and whether dropping some is found to pay, or not to."""

import math
import statistics
from dataclasses import replace

import pytest

from tests.support.worlds.drop_world import NODES, World
from vllm_graft.spec_decode.tuning import drops
from vllm_graft.spec_decode.tuning.drops import KEEP_ALL, Drops, expert_seconds, price_of

SEEDS = range(2)


def gain(world: World) -> float:
    """Return tokens per second with dropped nodes over those without."""
    found = {
        drop: statistics.mean(world.rate(drops=drop, seed=seed) for seed in SEEDS)
        for drop in (False, True)
    }
    return found[True] / found[False] - 1


@pytest.mark.parametrize("text", ["chat", pytest.param("mixed", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("sure", [1.0, pytest.param(1.25, marks=pytest.mark.nightly)])
def test_a_single_request_gains(text: str, sure: float) -> None:
    assert gain(World(text, 1, sure=sure)) > 0.03


@pytest.mark.parametrize("alike", [1.0, pytest.param(0.6, marks=pytest.mark.nightly)])
def test_a_batch_that_reads_all_experts_loses_little(alike: float) -> None:
    assert gain(World("chat", 16, alike=alike)) > -0.02


def test_a_price_that_is_far_too_high_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft knows its chances badly: what it calls unlikely is likely."""
    world = World("chat", 1, experts=3e-3, sure=0.3)
    monkeypatch.setattr(Drops, "price", lambda *_: (1e6, -0.1))
    assert gain(world) > -0.1
    # Control: always to drop is far worse.
    monkeypatch.setattr(Drops, "nodes", lambda *_: NODES)
    assert gain(world) < -0.3


def test_the_price_of_all_experts_is_found_in_measured_steps() -> None:
    world = World("chat", 1)
    schedule = [0, 63, 30, 14, 6, 3, 1]
    log = math.log1p(-world.share)
    assert expert_seconds(world.costs(schedule), log) == pytest.approx(world.experts, rel=0.02)
    dense = replace(world, experts=0.0)
    assert expert_seconds(dense.costs(schedule), log) < 1e-5
    assert expert_seconds({}, log) == 0
    assert expert_seconds({3: {1: 0.01}}, log) == 0


def test_a_node_is_worth_its_experts() -> None:
    """A first node costs what two rows read, if two requests get 100 tokens a second."""
    world, tuned = World("chat", 1), Drops(8 / 128)
    tuned.seed(world.costs([0, 63, 14, 3, 1]))
    tuned.observe(2, 3, [2, 2], 0.02, dropped=False)
    worth, decay = tuned.price(2, 2)
    first = worth * (1 - math.exp(decay))
    read = world.experts * ((15 / 16) ** 2 - (15 / 16) ** 4)
    assert first == pytest.approx(100 * read, rel=0.05)


def test_a_way_that_is_not_tried_any_more_tells_no_price() -> None:
    """Its text has ended, or its contexts were short: the pace of then would stay for good."""
    tuned = Drops(8 / 128)
    tuned.seed(World("chat", 1).costs([0, 63, 14, 3, 1]))
    tuned.observe(1, 3, [2], 0.01, dropped=False)
    assert {tuned.nodes(1, [0, 3, 7]) for _ in range(20)} == {None, 3, 7}
    tuned.observe(1, 3, [9], 0.01, dropped=True)
    before, _ = tuned.price(1, 1)
    for _ in range(20):
        tuned.observe(1, 7, [2], 0.02, dropped=False)
        tuned.nodes(1, [0, 3, 7])
    now, _ = tuned.price(1, 1)
    assert now < before / 4


def test_without_measured_steps_nothing_is_dropped() -> None:
    tuned = Drops(8 / 128)
    assert {tuned.nodes(1, [0, 3, 7]) for _ in range(20)} == {None}


def test_ways_that_cannot_be_timed_are_left() -> None:
    """Prompts beside all steps hide what a way takes: the tuner's own choice stays."""
    tuned = Drops(8 / 128)
    tuned.seed(World("chat", 1).costs([0, 63, 14, 3, 1]))
    tuned.observe(1, 3, [2], 0.01, dropped=False)
    asked = [tuned.nodes(1, [0, 3, 7]) for _ in range(60)]
    assert {*asked[:20]} == {3, 7, None}
    assert {*asked[20:]} == {None}
    # Control: what is timed, and yields more, stays.
    tuned.observe(1, 7, [4], 0.01, dropped=True)
    assert {tuned.nodes(1, [0, 3, 7]) for _ in range(60)} >= {7}


def test_a_step_without_a_price_keeps_all() -> None:
    assert price_of(object()) == KEEP_ALL
    assert drops.KEEP_ALL == (0.0, 0.0)

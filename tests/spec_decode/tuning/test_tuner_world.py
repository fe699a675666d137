"""The tuner against the best fixed numbers, on an engine whose times and texts are an H200's."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.crossed import crossed
from tests.support.worlds.tuner_world import MAX_REQS, make
from tests.support.worlds.wrong_costs import dense, shares
from vllm_graft.spec_decode.tuning import step_times
from vllm_graft.spec_decode.tuning.step_times import Shared
from vllm_graft.spec_decode.tuning.trials import Trials
from vllm_graft.spec_decode.tuning.tuner import NodeTuner

TEXTS = ["0", "0.6", "1", "hard"]
HARDEST = 0.04
"""Like `tuner_world.HARD`, for a text that is harder still."""


def serve(
    tuner: NodeTuner,
    text: str | float,
    batches: Sequence[int],
    *,
    prompts: float = 0.0,
    seed: int = 0,
) -> float:
    """Return throughput over that of the best number for each batch, exploration included."""
    worlds = [dense(text, batch, beside=prompts) for batch in batches]
    return shares(worlds, [len(batches)], seed, tuner)[0]


def drifting(steps: int, seed: int) -> list[int]:
    """Yield another batch size every 50 steps."""
    rng = random.Random(seed)
    return [batch for _ in range(steps // 50) for batch in [rng.randint(1, MAX_REQS)] * 50]


@pytest.mark.parametrize(("text", "prompts"), crossed(TEXTS, [0.0, 0.3]))
def test_large_batches(text: str, prompts: float) -> None:
    assert serve(make(), text, [64] * 2000, prompts=prompts) > 0.96


@pytest.mark.parametrize(("text", "prompts"), crossed(TEXTS, [0.0, 0.3]))
def test_batches_that_drift(text: str, prompts: float) -> None:
    assert serve(make(), text, drifting(2000, seed=5), prompts=prompts) > 0.95


@pytest.mark.parametrize(
    "batch", [1, *(pytest.param(batch, marks=pytest.mark.nightly) for batch in (4, 16))]
)
def test_small_batches(batch: int) -> None:
    """One request's text hides what numbers are worth; at most 3 % are lost on average."""
    ratios = [serve(make(), text, [batch] * 2000, seed=seed) for text in TEXTS for seed in (0, 1)]
    assert sum(ratios) / len(ratios) > 0.97
    assert min(ratios) > 0.9


@pytest.mark.parametrize("batch", [1, pytest.param(16, marks=pytest.mark.nightly), 128])
def test_down_to_nothing(batch: int) -> None:
    tuner, choices = make(), list[int]()
    begin_step = tuner.begin_step

    def recorded(batch: int) -> int:
        choices.append(begin_step(batch))
        return choices[-1]

    tuner.begin_step = recorded  # type: ignore[method-assign]
    # One request tells little of its text: with other seeds 0.92 to 0.96, with trials or without.
    share = serve(tuner, HARDEST, [batch] * 3000)
    assert share > (0.9 if batch == 1 else 0.95)
    # One draft costs small batches nothing: one more row, and no pass of the draft.
    few = sum(nodes <= (batch < 128) for nodes in choices[-1500:])
    assert few > 0.5 * 1500


@pytest.mark.parametrize(
    "text", ["0", *(pytest.param(text, marks=pytest.mark.nightly) for text in ("0.6", "1", "hard"))]
)
def test_without_measured_costs(text: str) -> None:
    assert serve(make(seeded=False), text, drifting(3000, seed=6), prompts=0.3) > 0.91


def test_it_comes_back_when_the_text_gets_easy() -> None:
    tuner = make()
    serve(tuner, HARDEST, [64] * 1500)
    assert serve(tuner, "0.6", [64] * 1500, seed=3) > 0.85
    assert serve(tuner, "0.6", [64] * 500, seed=4) > 0.99


KV_MS = 4e-5
"""Milliseconds that a step takes per K/V token; 16 requests of 30,000 tokens take 19."""


def mixed_contexts(tuner: NodeTuner, text: str, *, told: bool) -> float:
    """Return how long the same tokens take with the best numbers, over how long they took."""
    short, long = (
        replace(dense(text, 16, beside=0.0, more=KV_MS * 16 * context), context=context)
        for context in (500, 30_000)
    )
    return shares(replace(long, other=short), [500, 2000], 3, tuner, told=told)[1]


@pytest.mark.parametrize("seeded", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_contexts_that_come_and_go(seeded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts add the same to all numbers of nodes, and so make many of them pay."""
    assert mixed_contexts(make(seeded), "1", told=True) > 0.95
    # Where nothing tells their lengths, trials and a number's own times find out a part of it.
    monkeypatch.setattr(Trials, "rival", lambda *_: None)
    monkeypatch.setattr(Shared, "own", lambda *_: (0.0, False))
    told, blind = (mixed_contexts(make(seeded), "1", told=told) for told in (True, False))
    assert told > 0.95
    assert told > blind + 0.005


@pytest.mark.parametrize(
    "batches", [(16, 1, 128), pytest.param((16, 4, 64, 1, 128), marks=pytest.mark.nightly)]
)
def test_texts_and_batches_in_turn(batches: Sequence[int]) -> None:
    tuner = make()
    ratios = {
        (text, batch): serve(tuner, text, [batch] * 600, prompts=0.1, seed=1)
        for text in ("0", "1", "0.6")
        for batch in batches
    }
    assert sum(ratios.values()) / len(ratios) > 0.97
    assert min(ratios.values()) > 0.88, ratios


def test_waves_of_prompts_do_not_count_as_what_prompts_add() -> None:
    """After a wave, whose steps take 20 times as long, few nodes pay in a large batch."""
    wave, usual = dense("1", 64, beside=1.0, more=200.0), dense("1", 64, beside=0.1)
    for seed in range(3):
        assert shares([*[wave] * 12, *[usual] * 400], [12, 412], seed, make())[1] > 0.93


def small_ratios() -> list[float]:
    """Throughput of a small model, whose steps the host bounds, over that of the best number."""
    worlds = [dense(text, batch, part=0.25, host=4.5) for text in ("0", "1") for batch in (4, 16)]
    return [shares(world, [300], 1)[0] for world in worlds]


def test_where_the_host_bounds_steps_more_nodes_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = small_ratios()
    assert min(ratios) > 0.93
    # Control: what steps take beyond their costs is added to all numbers of nodes alike.
    monkeypatch.setattr(step_times, "with_host", lambda shared, _: shared)
    without = small_ratios()
    assert statistics.mean(without) < statistics.mean(ratios) - 0.015
    assert min(without) < min(ratios) - 0.03

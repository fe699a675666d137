"""The tuner in closed loops, see `tests.support.worlds.closed_loop`."""

from __future__ import annotations

import pytest

from tests.support.worlds.closed_loop import SmallModel, against_the_best
from tests.support.worlds.tuner_world import make
from vllm_graft.spec_decode.tuning.excess import Floor
from vllm_graft.spec_decode.tuning.step_times import StepTimes


def test_texts_and_batches_in_turn() -> None:
    tuner = make()
    ratios = {
        (text, batch): against_the_best(tuner, text, batch, seed=1)
        for text in ("0", "1", "0.6")
        for batch in (16, 4, 64, 1, 128)
    }
    assert sum(ratios.values()) / len(ratios) > 0.97
    assert min(ratios.values()) > 0.88, ratios


def test_waves_of_prompts_do_not_count_as_what_prompts_add() -> None:
    """After the first wave, whose step takes 20 times as long, few nodes pay in a large batch."""
    for seed in range(3):
        assert against_the_best(make(), "1", 64, seed) > 0.93


def small_ratios() -> dict[tuple[str, int], float]:
    """Throughput of a small model over that of the best fixed number, by text and batch."""
    model = SmallModel()
    return {
        (text, batch): model.against_the_best(text, batch)
        for text in ("0", "1")
        for batch in (4, 16)
    }


def test_where_the_host_bounds_steps_more_nodes_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = small_ratios()
    assert min(ratios.values()) > 0.93, ratios
    # Control: what steps take beyond their costs is added to all numbers of nodes alike.
    monkeypatch.setattr(StepTimes, "floor", lambda *_: Floor())
    assert min(small_ratios().values()) < min(ratios.values()) - 0.05

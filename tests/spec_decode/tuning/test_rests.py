"""Drafts without a model rest where texts never repeat themselves, and come back where they do."""

import pytest

from tests.support.worlds.repeating_world import (
    Engine,
    Step,
    best_rate,
    fixed_rate,
    make,
    rate,
    schedule,
)
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.tuning.rests import LONGEST, PROBE, REST, TRIAL, Phase, Rests
from vllm_graft.spec_decode.tuning.shapes import auto_schedule
from vllm_graft.spec_decode.tuning.tuner import NodeTuner

BATCHES = (1, 4, 16, 64)
COPY = 0.95
"""Chance that the next token is the one of a match, where a text copies."""


def begins_to_draft(steps: list[Step]) -> int:
    """The first of a dozen steps in a row that verify drafts; all of them if there are none."""
    drafts = [step.nodes > 0 for step in steps]
    starts = (start for start in range(len(drafts)) if all(drafts[start : start + TRIAL]))
    return next(starts, len(drafts))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch", BATCHES)
def test_texts_that_never_repeat_cost_a_hundredth(batch: int, seed: int) -> None:
    engine = Engine(make(), batch, seed)
    first = engine.serve(0.0, 60)
    assert begins_to_draft(first[30:]) == 30
    assert rate(engine.serve(0.0, 600)) > 0.99 * fixed_rate(batch, 0)
    # So does a text that repeats itself no more.
    engine.serve(COPY, 300)
    engine.serve(0.0, 60)
    assert rate(engine.serve(0.0, 600)) > 0.99 * fixed_rate(batch, 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch", BATCHES)
def test_texts_that_begin_to_repeat_get_drafts_again(batch: int, seed: int) -> None:
    engine = Engine(make(), batch, seed)
    engine.serve(0.0, 700)
    steps = engine.serve(COPY, 400)
    assert begins_to_draft(steps) <= 100
    assert rate(steps[100:]) > 0.9 * best_rate(batch, COPY)


def test_other_requests_end_a_rest() -> None:
    engine = Engine(make(), 1, seed=0)
    engine.serve(0.0, 700)
    assert begins_to_draft(engine.serve(COPY, 60, others=True)) <= 3


def test_without_rests_hopeful_estimates_draft_on() -> None:
    """Negative control."""
    engine = Engine(make(rests=False), 1, seed=0)
    engine.serve(0.0, 60)
    assert rate(engine.serve(0.0, 600)) < 0.98 * fixed_rate(1, 0)


def test_drafts_rest_before_any_cost_is_known() -> None:
    """Nothing is measured at the start where there are no CUDA graphs."""
    engine = Engine(make(seeded=False), 4, seed=0)
    engine.serve(0.0, 60)
    assert rate(engine.serve(0.0, 600)) > 0.98 * fixed_rate(4, 0)
    assert begins_to_draft(engine.serve(COPY, 200)) <= 100


def test_each_rest_is_twice_as_long_until_a_probe_finds_something() -> None:
    rests = Rests()

    def rest() -> int:
        """Let drafts find nothing until they rest; return the steps of the rest."""
        for _ in range(TRIAL):
            rests.observe(1.0, 1.1, same=True)
        steps = 0
        while rests.begin_step() is Phase.REST:
            steps += 1
        return steps

    assert [rest() for _ in range(5)] == [REST, 2 * REST, LONGEST, LONGEST, LONGEST]
    assert rests.begin_step() is Phase.PROBE
    for _ in range(PROBE):
        rests.observe(2.0, 1.1, same=True)
    assert rests.begin_step() is Phase.DRAFT
    for _ in range(TRIAL):
        rests.observe(2.0, 1.1, same=True)
    assert [rest() + rest(), rest()] == [REST, 2 * REST]


@pytest.mark.parametrize("max_num_seqs", range(2, 16))
def test_no_drafts_are_a_number_of_every_table(max_num_seqs: int) -> None:
    table = schedule(max_num_seqs)
    numbers = set(table[1:])
    assert 0 in numbers
    assert len(numbers) == min(max_num_seqs, 11)


def test_drafts_of_a_model_keep_their_widest_trees() -> None:
    """Negative control: with a model a table of few batches has no rest."""
    config = TreeConfig(topk=8, steps=12, shape="auto")
    assert [nodes for *_, nodes in auto_schedule(config, 63, 4)] == [63, 31, 30, 15]


def test_a_table_without_a_rest_never_rests() -> None:
    tuner = NodeTuner([0, 3, 3], 512, rests=True)
    for _ in range(200):
        assert tuner.begin_step(1) == 3
        tuner.observe(3, [1], 0.005, batch=1)

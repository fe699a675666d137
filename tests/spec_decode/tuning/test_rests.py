"""Drafts without a model rest where texts never repeat themselves, and come back where they do."""

import statistics

import pytest

from tests.support.worlds.repeating_world import (
    HOST_BOUND,
    Engine,
    Step,
    best_rate,
    fixed_rate,
    make,
    rate,
    schedule,
)
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.tuning.shapes import auto_schedule
from vllm_graft.spec_decode.tuning.tuner import BLOCK, LOSS, MOST, NodeTuner

BATCHES = (1, 4, 16, 64)
COPY = 0.95
"""Chance that the next token is the one of a match, where a text copies."""


def begins_to_draft(steps: list[Step]) -> int:
    """The first of 12 steps in a row that verify drafts; all of them if there are none."""
    drafts = [step.nodes > 0 for step in steps]
    starts = (start for start in range(len(drafts)) if all(drafts[start : start + 12]))
    return next(starts, len(drafts))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch", BATCHES)
def test_texts_that_never_repeat_cost_a_hundredth(batch: int, seed: int) -> None:
    engine = Engine(make(), batch, seed)
    engine.serve(0.0, 60)
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


def of_best(batch: int, chance: float, seed: int) -> float:
    """Throughput where the host bounds the steps, and drafts let it do more, over the best one."""
    engine = Engine(make(), batch, seed, HOST_BOUND)
    engine.serve(chance, 100)
    return rate(engine.serve(chance, 1500)) / best_rate(batch, chance, HOST_BOUND)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.2])
def test_drafts_that_take_the_host_more_than_they_yield_rest(
    chance: float, batch: int, seed: int
) -> None:
    """Their steps take 1.3 times as long, and yield 1.25 tokens at most."""
    assert of_best(batch, chance, seed) > 0.99


@pytest.mark.parametrize(("batch", "least"), [(1, 0.9), (4, 0.96), (16, 0.96)])
@pytest.mark.parametrize("chance", [0.5, COPY])
def test_drafts_that_pay_where_the_host_bounds_steps(
    batch: int, least: float, chance: float
) -> None:
    assert statistics.mean(of_best(batch, chance, seed) for seed in range(3)) > least


@pytest.mark.parametrize("batch", [1, 16])
def test_drafts_that_nothing_is_compared_with_go_on(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a step without drafts is taken to be as long as one with drafts."""
    monkeypatch.setattr(NodeTuner, "_doubts_rest", lambda *_: False)
    assert min(of_best(batch, 0.1, seed) for seed in range(2)) < 0.93


@pytest.mark.parametrize(("chance", "least"), [(0.0, 0.99), (0.1, 0.99), (0.5, 0.97)])
def test_requests_are_trusted_as_those_before_them(chance: float, least: float) -> None:
    """Each request of 100 steps is another text. Not even its first drafts may cost much."""
    engine = Engine(make(), 1, 0, HOST_BOUND)
    engine.serve(chance, 60)
    steps = [step for _ in range(12) for step in engine.serve(chance, 100, others=True)]
    assert rate(steps) > least * best_rate(1, chance, HOST_BOUND)


def answers_of_copies(batch: int, seed: int, *, told: bool) -> float:
    """Throughput of answers that copy from their 16th token on, over that without drafts, after
    many that did not copy."""
    engine = Engine(make(), batch, seed, HOST_BOUND)
    for _ in range(12):
        engine.serve(0.05, 128, others=True)
    steps = [step for _ in range(12) for step in engine.answer(128, 16, told=told)]
    return rate(steps) / fixed_rate(batch, 0, 0.0, HOST_BOUND)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_an_answer_that_begins_to_copy_is_noticed(batch: int, seed: int) -> None:
    """Drafts from the first token on that is copied would give 5.0. Without what the scheduler
    sees, 100 tokens end before enough is saved for drafts."""
    assert answers_of_copies(batch, seed, told=True) > 3.0
    assert answers_of_copies(batch, seed, told=False) < 1.3


@pytest.mark.parametrize("seed", range(3))
def test_phrases_that_come_twice_cost_a_fiftieth(seed: int) -> None:
    engine = Engine(make(), 1, seed, HOST_BOUND)
    engine.serve(0.05, 200)
    steps = []
    for _ in range(40):
        steps += engine.serve(0.05, 25)
        engine.tuner.heed(9)
    assert rate(steps) > 0.98 * best_rate(1, 0.05, HOST_BOUND)


@pytest.mark.parametrize("seed", range(3))
def test_one_of_many_that_copies_for_ever_costs_a_fiftieth(seed: int) -> None:
    engine = Engine(make(), 64, seed, HOST_BOUND)
    engine.serve(0.05, 200)
    steps = []
    for _ in range(300):
        steps += engine.serve(0.05, 4)
        if not steps[-1].nodes:
            engine.tuner.heed(engine.tuner.copied)
    assert rate(steps) > 0.98 * best_rate(64, 0.05, HOST_BOUND)


def test_steps_without_drafts_are_timed_once() -> None:
    """Copies that are good beyond doubt are never interrupted, others for a block."""
    for chance, rests in ((COPY, 0), (0.5, BLOCK)):
        engine = Engine(make(), 4, 0, HOST_BOUND)
        engine.serve(COPY, 40)
        steps = engine.serve(chance, 400)
        assert sum(not step.nodes for step in steps) <= rests


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


def seeded(part: float) -> NodeTuner:
    """A tuner of one number of nodes, whose steps take so much more than those without."""
    tuner = NodeTuner([0, 3, 0], 512, rests=True)
    tuner.seed({0: {1: 0.005}, 3: {1: 0.005 * (1 + part)}})
    return tuner


def draft_steps(tuner: NodeTuner, tokens: int, steps: int) -> int:
    """Steps with drafts, all of which emit so many tokens."""
    found = 0
    for _ in range(steps):
        nodes = tuner.begin_step(1)
        found += nodes > 0
        tuner.observe(nodes, [tokens if nodes else 1], None)
    return found


@pytest.mark.parametrize("part", [0.02, 0.1, 0.15])
def test_drafts_lose_what_was_saved_for_them(part: float) -> None:
    tuner = seeded(part)
    # The last block may go on after it is spent.
    assert draft_steps(tuner, 1, 600) * part <= MOST + 600 * LOSS + BLOCK * part
    # One draft in a block that is accepted pays for the next ones.
    assert draft_steps(tuner, 2, 1200) > 600


def test_what_was_won_is_no_reason_to_lose_it_again() -> None:
    tuner = seeded(0.1)
    draft_steps(tuner, 4, 600)
    assert draft_steps(tuner, 1, 60) <= (MOST + 60 * LOSS) / 0.1 + BLOCK


@pytest.mark.parametrize("chance", [0.05, 0.1, 0.2])
def test_drafts_that_seldom_hit_pay_for_one_request(chance: float) -> None:
    """A row costs next to nothing there. Matches of two tokens are right that seldom."""
    steps = [step for seed in range(3) for step in Engine(make(), 1, seed).serve(chance, 800)]
    assert sum(step.nodes > 0 for step in steps) > 0.6 * len(steps)
    assert rate(steps) > 0.93 * best_rate(1, chance)
    assert rate(steps) > 1.005 * fixed_rate(1, 0)


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

"""Estimates for trees that were verified and that were not, and trials of other numbers."""

import random

import pytest

from vllm_graft.spec_decode.tuning.acceptance import WIDTH_GAIN, Acceptance
from vllm_graft.spec_decode.tuning.trials import LEAST_SHARE, SHARE, WAIT, Trials

LEVELS = {1: 1, 7: 7, 15: 7, 63: 7}


def drawn(miss: float, levels: int, trees: int, seed: int = 0) -> list[int]:
    """Draw the tokens that each tree emits if it misses each level with the chance `miss`."""
    rng = random.Random(seed)
    found = []
    for _ in range(trees):
        tokens = 1
        while tokens <= levels and rng.random() >= miss:
            tokens += 1
        found.append(tokens)
    return found


def observe(
    acceptance: Acceptance,
    nodes: int,
    miss: float,
    *,
    trees: int,
    steps: int,
    alike: bool = True,
    temperature: float = 0.0,
) -> None:
    """Observe steps of so many trees of 7 levels; `alike` is for the first, True for others."""
    for step in range(steps):
        found = drawn(miss, 7, trees, step)
        acceptance.observe(nodes, found, alike=alike or step > 0, temperature=temperature)


def mean(miss: float, levels: int) -> float:
    return sum((1 - miss) ** level for level in range(1, levels + 1))


def test_a_chain_tells_of_every_tree() -> None:
    acceptance = Acceptance(LEVELS)
    # Each rate comes from about the last 600 trees, which missed some 430 levels.
    misses, lengths = [], []
    for step in range(200):
        acceptance.observe(7, drawn(0.2, 7, 32, step))
        misses.append(acceptance.miss)
        lengths.append(acceptance.upper(7))
    assert sum(misses) / len(misses) == pytest.approx(0.2, rel=0.05)
    assert acceptance.miss == pytest.approx(0.2, rel=0.1)
    # Where nothing was seen, the upper estimate is a little above what is expected.
    for nodes in (15, 63):
        expected = mean(0.2 * (nodes / 7) ** -WIDTH_GAIN, 7)
        assert expected < acceptance.upper(nodes) < 1.2 * expected
    assert sum(lengths[-100:]) / 100 == pytest.approx(mean(0.2, 7), rel=0.03)
    assert acceptance.upper(7) == pytest.approx(mean(0.2, 7), rel=0.06)
    assert acceptance.upper(0) == 0


def test_a_number_that_is_off_the_rule_is_noticed_beside_another() -> None:
    """15 nodes miss as often as 7 do, where the rule says a fifth less."""
    acceptance = Acceptance(LEVELS)
    for step in range(400):
        nodes = 7 if step // 20 % 2 else 15
        acceptance.observe(nodes, drawn(0.2, 7, 32, step))
    assert acceptance.upper(15) == pytest.approx(mean(0.2, 7), rel=0.06)


def test_another_batch_proves_nothing_of_a_number() -> None:
    """The batch, and so the text, changed with the number, so the rule has nothing to explain."""
    acceptance = Acceptance(LEVELS)
    observe(acceptance, 7, 0.5, trees=32, steps=100)
    observe(acceptance, 15, 0.05, trees=32, steps=100, alike=False)
    chain = 0.05 / (15 / 7) ** -WIDTH_GAIN
    assert acceptance.miss == pytest.approx(chain, rel=0.15)


def test_nor_does_it_when_the_number_follows() -> None:
    """The number changes after the first step of the other batch."""
    acceptance = Acceptance(LEVELS)
    observe(acceptance, 7, 0.5, trees=64, steps=150)
    observe(acceptance, 7, 0.1, trees=16, steps=1, alike=False)
    observe(acceptance, 15, 0.1, trees=16, steps=12)
    chain = 0.1 / (15 / 7) ** -WIDTH_GAIN
    assert acceptance.miss == pytest.approx(chain, rel=0.2)
    assert acceptance.upper(15) == pytest.approx(mean(0.1, 7), rel=0.06)


def test_nor_do_other_requests() -> None:
    """Requests come one at a time, each with its own text, and the number changes with them."""
    acceptance = Acceptance(LEVELS)
    for request in range(60):
        nodes, miss = (15, 0.3) if request % 2 else (7, 0.15)
        for step in range(40):
            tokens = drawn(miss, 7, 1, 40 * request + step)
            acceptance.observe(nodes, tokens, same=step > 0)
    # By the rule 15 nodes miss a fifth less than 7; the rest of the difference is due to texts.
    assert acceptance._seen[15].own == pytest.approx(1, abs=0.05)
    assert acceptance._seen[7].own == pytest.approx(1, abs=0.05)


def test_what_many_trees_told_is_not_held_on_to_by_few() -> None:
    acceptance = Acceptance(LEVELS)
    observe(acceptance, 7, 0.27, trees=64, steps=150)
    observe(acceptance, 7, 0.17, trees=16, steps=12, alike=False)
    assert acceptance.miss == pytest.approx(0.17, rel=0.2)


def test_another_text_is_noticed_at_once() -> None:
    acceptance = Acceptance(LEVELS)
    observe(acceptance, 7, 0.6, trees=16, steps=300)
    observe(acceptance, 7, 0.1, trees=16, steps=12)
    assert acceptance.miss < 0.15


def test_texts_of_other_temperatures_are_remembered() -> None:
    acceptance = Acceptance(LEVELS)
    observe(acceptance, 7, 0.4, trees=1, steps=400, temperature=1.0)
    hot = acceptance.miss
    observe(acceptance, 7, 0.1, trees=1, steps=400, temperature=0.0)
    assert acceptance.miss == pytest.approx(0.1, rel=0.3)
    # The old text is back at once, also for another temperature of its class.
    acceptance.observe(7, [3], temperature=0.9)
    assert acceptance.miss == pytest.approx(hot, rel=0.05)
    acceptance.observe(7, [3], temperature=0.0)
    assert acceptance.miss == pytest.approx(0.1, rel=0.3)


def test_a_temperature_that_is_new_begins_with_what_is_known_and_learns_soon() -> None:
    acceptance = Acceptance(LEVELS)
    observe(acceptance, 7, 0.4, trees=1, steps=400, temperature=1.0)
    before = acceptance.miss
    acceptance.observe(7, [4], temperature=0.5)
    assert acceptance.miss == pytest.approx(before, rel=0.4)
    observe(acceptance, 7, 0.1, trees=1, steps=30, temperature=0.5)
    assert acceptance.miss < 0.2


def test_long_without_drafts() -> None:
    acceptance = Acceptance(LEVELS)
    acceptance.observe(7, drawn(0.2, 7, 32))
    for _ in range(200_000):
        acceptance.observe(0, [1])
    assert 0 < acceptance.miss < 1
    assert acceptance.upper(63) > 0


def copying(acceptance: Acceptance, nodes: int, copied: float, *, steps: int = 150) -> None:
    """Observe trees of 7 levels; a fraction of them copies 20 tokens, as far as nodes go."""
    rng = random.Random(0)
    for step in range(steps):
        found = drawn(0.3, 7, 16, step)
        found = [min(nodes, 20) + 1 if rng.random() < copied else count for count in found]
        acceptance.observe(nodes, found)


def test_copies_count_below_the_levels_alone() -> None:
    """Paths of n-grams make large trees worth more, and the draft's chance no other one."""
    acceptance, cut = Acceptance(LEVELS), Acceptance(LEVELS)
    copying(acceptance, 63, 0.5)
    rng = random.Random(0)
    for step in range(150):
        found = drawn(0.3, 7, 16, step)
        # The same trees, of which nobody has seen what lies below the levels.
        cut.observe(63, [8 if rng.random() < 0.5 else count for count in found])
    assert acceptance.miss == cut.miss
    more = {nodes: acceptance.upper(nodes) - cut.upper(nodes) for nodes in LEVELS}
    assert more[63] == pytest.approx(0.5 * (20 - 7), rel=0.06)
    assert more[15] == pytest.approx(0.5 * (15 - 7), rel=0.06)
    assert more[7] == more[1] == 0


def test_a_small_tree_tells_of_copies_as_far_as_it_goes() -> None:
    acceptance, plain = Acceptance(LEVELS), Acceptance(LEVELS)
    copying(acceptance, 15, 0.5)
    copying(plain, 15, 0.0)
    assert acceptance.upper(63) - plain.upper(63) > 0.5 * (15 - 7)


def test_copies_are_forgotten_with_their_text() -> None:
    acceptance, plain = Acceptance(LEVELS), Acceptance(LEVELS)
    copying(acceptance, 63, 0.9)
    for each in (acceptance, plain):
        copying(each, 63, 0.0, steps=600)
    assert acceptance.upper(63) == pytest.approx(plain.upper(63), rel=0.01)
    copying(acceptance, 63, 0.9, steps=20)
    before = acceptance.upper(63)
    acceptance.observe(63, drawn(0.3, 7, 16), temperature=1.0)
    assert acceptance.upper(63) < before - 3


BLOCK = 6
SECONDS = {3: 0.006, 7: 0.008, 15: 0.010, 31: 0.015}
SCORES = {3: 0.7, 7: 0.9, 15: 1.0, 31: 0.5}
RIGHT = dict.fromkeys(SCORES, False)

PRICES = {
    nodes: BLOCK * SECONDS[nodes] / SECONDS[15] * (1 - score) for nodes, score in SCORES.items()
}
"""Steps that a block of a number loses, in the place of one of 15 nodes."""


def serve(
    choices: int, judged: dict[int, bool], size: int = 4, tried: Trials | None = None
) -> dict[int, int]:
    """Return the numbers that were tried, by the number of the choice."""
    tried = tried or Trials(BLOCK)
    found = (tried.rival(size, SCORES, SECONDS, judged) for _ in range(choices))
    return {number: rival for number, rival in enumerate(found, start=1) if rival is not None}


def test_each_number_is_tried_once_the_best_first() -> None:
    found = serve(3000, RIGHT)
    assert list(found.values())[:3] == [7, 3, 31]
    assert next(iter(found)) == WAIT
    # Each size of batches has trials of its own.
    tried = Trials(BLOCK)
    assert serve(WAIT, RIGHT, 4, tried) == serve(WAIT, RIGHT, 8, tried) == {WAIT: 7}


def test_right_costs_lose_a_small_part_of_all_steps() -> None:
    for choices in (200, 1000, 5000, 50_000):
        lost = sum(PRICES[nodes] for nodes in serve(choices, RIGHT).values())
        assert lost <= SHARE * BLOCK * choices + PRICES[7]
    # Further rounds cost less and less, and never end.
    times = list(serve(100_000, RIGHT))
    assert times[-1] > 50_000
    rounds = len(times) // 3
    assert 3 * rounds * LEAST_SHARE < sum(PRICES.values())
    assert times[3] - times[0] < times[-1] - times[-4]


def test_a_wrong_cost_makes_the_next_trial_come_soon() -> None:
    tried, judged = Trials(BLOCK), dict[int, bool]()
    found = list[int]()
    for _ in range(1, 4 * WAIT):
        rival = tried.rival(4, SCORES, SECONDS, judged)
        if rival is not None:
            found.append(rival)
            judged[rival] = True
    assert found == [7, 3, 31]
    # What is known already to be wrong is no news.
    assert serve(8 * WAIT, {**RIGHT, 7: True}) == serve(8 * WAIT, RIGHT) == {WAIT: 7}


def test_the_number_in_use_may_have_the_wrong_cost() -> None:
    tried = Trials(BLOCK)
    assert serve(8 * WAIT, RIGHT, 4, tried) == {WAIT: 7}
    assert list(serve(WAIT, {**RIGHT, 15: True}, 4, tried).values()) == [3]


def test_a_number_whose_steps_all_had_prompts_is_tried_again() -> None:
    found = serve(400, {})
    assert len(found) > 1
    assert set(found.values()) == {7}


@pytest.mark.parametrize("scores", [{15: 1.0}, {0: 0.95, 1: 1.0}])
def test_other_numbers_may_be_none_or_no_drafts_at_all(scores: dict[int, float]) -> None:
    tried, seconds = Trials(BLOCK), dict.fromkeys(scores, 0.01)
    found = [tried.rival(1, scores, seconds, {}) for _ in range(WAIT)]
    assert found == [None] * (WAIT - 1) + [None if len(scores) == 1 else 0]

from __future__ import annotations

import pytest

from vllm_graft.spec_decode.tuning.trials import LEAST_SHARE, SHARE, WAIT, Trials

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

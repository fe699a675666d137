from __future__ import annotations

from vllm_graft.spec_decode.tuning.trials import COMPARED, FIRST, NEAR, Trials

SCORES = {3: 0.7, 7: 0.9, 15: 1.0}


def test_the_second_best_is_tried_ever_more_rarely() -> None:
    tried = Trials()
    found = [tried.rival(4, SCORES, spread=0.0) for _ in range(40)]
    at = [number for number, rival in enumerate(found, start=1) if rival is not None]
    assert at == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST]
    assert {rival for rival in found if rival is not None} == {7}
    # Each size of batches has trials of its own.
    assert [tried.rival(8, SCORES, spread=0.0) for _ in range(FIRST)] == [None] * (FIRST - 1) + [7]


def test_nothing_is_tried_that_is_compared_or_far_worse_or_alone() -> None:
    for scores, spread in (
        (SCORES, COMPARED),
        ({7: (1 - NEAR) * 0.99, 15: 1.0}, 0.0),
        ({15: 1.0}, 0.0),
    ):
        tried = Trials()
        assert [tried.rival(1, scores, spread) for _ in range(3 * FIRST)] == [None] * 3 * FIRST


def test_no_drafts_at_all_may_be_the_rival() -> None:
    tried = Trials()
    assert [tried.rival(1, {0: 0.95, 1: 1.0}, 0.0) for _ in range(FIRST)][-1] == 0

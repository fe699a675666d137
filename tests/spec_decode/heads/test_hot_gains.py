"""What hot tokens save, and what they must hold for it."""

from __future__ import annotations

import pytest

from vllm_graft.spec_decode.heads.hot_vocabulary import COVERAGE, LOST, HotGains

WHOLE = {0: {1: 5.0}, 1: {1: 5.5, 4: 6.0}, 7: {1: 8.0, 4: 10.0, 16: 20.0}}
HOT = {1: {1: 5.5, 4: 6.0}, 7: {1: 6.0, 4: 9.0, 16: 19.8}}


@pytest.fixture
def gains() -> HotGains:
    return HotGains(WHOLE, HOT)


@pytest.mark.parametrize(
    ("nodes", "num_reqs", "gain"),
    [(7, 1, 0.25), (7, 2, 0.1), (7, 4, 0.1), (7, 16, 0.01), (7, 40, 0.01), (1, 1, 0), (0, 1, 0)],
)
def test_the_next_larger_batch_tells_the_gain(
    gains: HotGains, nodes: int, num_reqs: int, gain: float
) -> None:
    assert gains.gain(nodes, num_reqs) == pytest.approx(gain)
    assert gains.least(nodes, num_reqs) == pytest.approx(1 - gain / LOST)


def test_nothing_is_held_for_nothing(gains: HotGains) -> None:
    """Where hot tokens save nothing, no coverage is enough."""
    assert gains.least(1, 1) >= 1.0
    assert gains.least(31, 1) >= 1.0, "a number that was not measured"
    assert HotGains(WHOLE, {7: {1: 9.0}}).least(7, 1) >= 1.0


def test_costs_are_those_of_what_steps_will_draft_from(gains: HotGains) -> None:
    assert gains.least(7, 16) > COVERAGE
    assert gains.expected() == {
        0: {1: 5.0},
        1: {1: 5.5, 4: 6.0},
        7: {1: 6.0, 4: 9.0, 16: 20.0},
    }

"""What contexts cost, fitted to steps of engines whose costs are known."""

from __future__ import annotations

import random

import pytest

from vllm_graft.spec_decode.tuning.context_cost import LARGEST_SHARE, ContextCost
from vllm_graft.spec_decode.tuning.step_times import StepTimes

PER_TOKEN = 4e-8
"""An 8B model's K/V, 128 KiB a token, at 3.3 TB/s."""

ALONE = {(1, 0): 0.0045, (1, 31): 0.0060, (16, 7): 0.0080}


def step(kind: tuple[int, int], tokens: int, rng: random.Random) -> float:
    """Seconds of a step; one in 20 is disturbed."""
    disturbed = 0.02 if rng.random() < 0.05 else 0.0
    return (ALONE[kind] + PER_TOKEN * tokens) * rng.uniform(0.97, 1.03) + disturbed


def told(cost: ContextCost, kinds: list[tuple[int, int]], tokens: list[int], count: int) -> None:
    rng = random.Random(1)
    for at in range(count):
        kind, context = kinds[at % len(kinds)], rng.choice(tokens)
        cost.observe(*kind, context, step(kind, context, rng))


def test_the_slope_is_found_from_kinds_that_cost_differently() -> None:
    cost = ContextCost()
    told(cost, list(ALONE), [500, 8000, 30_000, 200_000], 400)
    assert cost.per_token == pytest.approx(PER_TOKEN, rel=0.1)
    assert cost.of(100_000) == pytest.approx(PER_TOKEN * 100_000, rel=0.1)


def test_a_slope_that_is_not_known_is_none() -> None:
    """Contexts alike, too few of them, and steps that get quicker with them."""
    cost = ContextCost()
    told(cost, list(ALONE), [30_000, 31_000], 400)
    assert cost.per_token == 0.0
    told(cost, [(1, 0)], [500], 5)
    assert cost.per_token == 0.0
    for at in range(400):
        cost.observe(1, 0, [500, 30_000][at % 2], [0.006, 0.005][at % 2])
    assert cost.per_token == 0.0


def test_kinds_with_other_contexts_are_not_compared() -> None:
    """Large batches have more tokens and take longer, whatever a token costs."""
    cost = ContextCost()
    for _ in range(400):
        cost.observe(1, 0, 500, 0.005)
        cost.observe(64, 0, 32_000, 0.020)
    assert cost.per_token == 0.0


def test_noise_of_short_contexts_is_not_extrapolated() -> None:
    """A difference of 3 % between 400 and 1,600 tokens would be half a second at 500,000."""
    cost = ContextCost()
    for _ in range(400):
        cost.observe(1, 0, 400, 0.00450)
        cost.observe(1, 0, 1600, 0.00464)
    assert cost.of(500_000) < 0.0005
    assert cost.of(500_000) == cost.of(3200)


def test_a_context_never_takes_all_of_a_step() -> None:
    cost = ContextCost()
    for at in range(400):
        # Short contexts were seen while the machine did something else.
        cost.observe(1, 0, [1000, 50_000][at % 2], [1e-9, 0.005][at % 2])
    assert 0 <= cost.of(1000) <= LARGEST_SHARE * 1e-9
    assert cost.of(50_000) <= LARGEST_SHARE * 0.005


def test_short_contexts_are_remembered_for_a_while() -> None:
    cost = ContextCost()
    told(cost, [(1, 0)], [500, 60_000], 200)
    known = cost.per_token
    told(cost, [(1, 0)], [60_000], 2000)
    assert cost.per_token == pytest.approx(known, rel=0.1)


# --- steps --------------------------------------------------------------------------------------


def measured(context: ContextCost) -> StepTimes:
    times = StepTimes(context)
    times.seed({nodes: {1: seconds, 16: 2 * seconds} for (_, nodes), seconds in ALONE.items()})
    return times


@pytest.mark.parametrize("seeded", [True, False])
def test_timings_of_all_contexts_tell_the_same(seeded: bool) -> None:
    context = ContextCost()
    times = measured(context) if seeded else StepTimes(context)
    rng = random.Random(2)
    for _ in range(600):
        kind, tokens = rng.choice([(1, 0), (1, 31)]), rng.choice([500, 30_000, 120_000])
        seconds = step(kind, tokens, rng)
        times.observe(*kind, seconds, tokens)
        context.observe(*kind, tokens, seconds)
    for kind in ((1, 0), (1, 31)):
        for tokens in (500, 60_000, 120_000):
            expected = ALONE[kind] + PER_TOKEN * tokens
            assert times.predict(*kind, tokens) == pytest.approx(expected, rel=0.08)
    assert times.least(1, 31, 60_000) == pytest.approx(ALONE[1, 31] + 60_000 * PER_TOKEN, rel=0.08)
    # The control: without the contexts, short ones hide what long ones take.
    blind = measured(ContextCost()) if seeded else StepTimes()
    for _ in range(600):
        tokens = rng.choice([500, 500, 120_000])
        blind.observe(1, 31, step((1, 31), tokens, rng))
    predicted = blind.predict(1, 31)
    assert predicted is not None
    assert predicted < 0.7 * (ALONE[1, 31] + PER_TOKEN * 120_000)


def test_timings_from_before_the_slope_was_known_are_read_with_it() -> None:
    context = ContextCost()
    times = measured(context)
    for _ in range(100):
        times.observe(1, 31, ALONE[1, 31] + PER_TOKEN * 60_000, 60_000)
    assert times.predict(1, 31, 500) == pytest.approx(ALONE[1, 31] + PER_TOKEN * 60_000, rel=0.1)
    told(context, [(1, 0)], [500, 60_000], 100)
    assert times.predict(1, 31, 500) == pytest.approx(ALONE[1, 31], rel=0.1)

"""What contexts cost, fitted to steps of engines whose costs are known."""

import random
from collections.abc import Sequence

import pytest

from vllm_graft.spec_decode.tuning.step_times import LEAST, Rates, StepTimes

PER_TOKEN = 4e-8
"""An 8B model's K/V, 128 KiB a token, at 3.3 TB/s."""

ALONE = {(1, 0): 0.0045, (1, 31): 0.0060, (16, 7): 0.0080}


def step(kind: tuple[int, int], tokens: int, rng: random.Random) -> float:
    """Seconds of a step; one in 20 is disturbed."""
    disturbed = 0.02 if rng.random() < 0.05 else 0.0
    return (ALONE[kind] + PER_TOKEN * tokens) * rng.uniform(0.97, 1.03) + disturbed


def told(cost: StepTimes, kinds: list[tuple[int, int]], tokens: list[int], count: int) -> None:
    rng = random.Random(1)
    for at in range(count):
        kind, context = kinds[at % len(kinds)], rng.choice(tokens)
        cost.observe(*kind, step(kind, context, rng), context)


def test_the_slope_is_found_from_kinds_that_cost_differently() -> None:
    cost = StepTimes()
    told(cost, list(ALONE), [500, 8000, 30_000, 200_000], 400)
    for nodes in (0, 7, 31):
        assert cost.rates.of(nodes) == pytest.approx(PER_TOKEN, rel=0.1)
        assert 100_000 * cost.rates.of(nodes) == pytest.approx(PER_TOKEN * 100_000, rel=0.1)


def test_a_slope_that_is_not_known_is_none() -> None:
    """Contexts are alike, or steps get quicker with them."""
    cost = StepTimes()
    told(cost, list(ALONE), [30_000, 31_000], 400)
    assert cost.rates == Rates()
    cost = StepTimes()
    for at in range(400):
        cost.observe(1, 0, [0.006, 0.005][at % 2], [500, 30_000][at % 2])
    assert cost.rates == Rates()


def test_kinds_with_other_contexts_are_not_compared() -> None:
    """Large batches have more tokens and take longer, whatever a token costs."""
    cost = StepTimes()
    for _ in range(400):
        cost.observe(1, 0, 0.005, 500)
        cost.observe(64, 0, 0.020, 32_000)
    assert cost.rates == Rates()


def test_noise_of_short_contexts_is_not_extrapolated() -> None:
    """A difference of 3 % between 400 and 1,600 tokens would be half a second at 500,000."""
    cost = StepTimes()
    for _ in range(400):
        cost.observe(1, 0, 0.00450, 400)
        cost.observe(1, 0, 0.00464, 1600)
    assert 500_000 * cost.rates.of(0) < 0.001


def test_a_context_never_takes_all_of_a_step() -> None:
    times = StepTimes()
    for at in range(400):
        # Short contexts were seen while the machine did something else.
        times.observe(1, 0, [1e-9, 0.005][at % 2], [1000, 50_000][at % 2])
    assert (times.predict(1, 0) or 0.0) >= LEAST * 0.9e-9


def test_short_contexts_are_remembered_for_a_while() -> None:
    cost = StepTimes()
    told(cost, [(1, 0)], [500, 60_000], 200)
    known = cost.rates.of(0)
    told(cost, [(1, 0)], [60_000], 2000)
    assert cost.rates.of(0) == pytest.approx(known, rel=0.1)


# --- rows ---------------------------------------------------------------------------------------

ROW = 1.2e-9
"""What a row adds to a token of an 8B model in FP8."""

READ = 2e-8
NODES = (7, 15, 63)


def short(nodes: int) -> float:
    """Seconds of a step over a short context, as the start measures it."""
    return 0.006 + 4e-5 * nodes


def by_rows(
    cost: StepTimes,
    numbers: Sequence[int],
    tokens: Sequence[int],
    *,
    read: float = READ,
    row: float = ROW,
    told: float | None = None,
) -> None:
    """Steps of 4 requests, whose costs over short contexts are told times a factor, or not."""
    if told:
        cost.seed({nodes: {4: told * short(nodes)} for nodes in numbers})
    rng = random.Random(3)
    for at in range(400):
        nodes, context = numbers[at % len(numbers)], rng.choice(tokens)
        seconds = short(nodes) + 0.0005 + context * (read + row * (nodes + 1))
        seconds *= rng.uniform(0.98, 1.02)
        cost.observe(4, nodes, seconds, context)


def true(nodes: int) -> float:
    return READ + ROW * (nodes + 1)


def test_rows_that_cost_more_are_found_from_different_contexts() -> None:
    cost = StepTimes()
    by_rows(cost, NODES, [2000, 130_000])
    for nodes in (*NODES, 0, 31):
        assert cost.rates.of(nodes) == pytest.approx(true(nodes), rel=0.12)
    # Control: rows that cost nothing.
    alike = StepTimes()
    by_rows(alike, NODES, [2000, 130_000], row=0.0)
    for nodes in (0, 31, 63):
        assert alike.rates.of(nodes) == pytest.approx(READ, rel=0.12)


@pytest.mark.parametrize("nodes", NODES)
def test_one_number_of_nodes_says_nothing_of_the_rows(nodes: int) -> None:
    cost = StepTimes()
    by_rows(cost, [nodes], [2000, 130_000], told=1.0)
    for other in (0, *NODES):
        assert cost.rates.of(other) == pytest.approx(true(nodes), rel=0.15)


def test_measured_costs_tell_what_rows_cost_where_all_contexts_are_long() -> None:
    cost = StepTimes()
    by_rows(cost, [15, 63], [120_000, 130_000], told=1.0)
    assert cost.rates.of(63) - cost.rates.of(15) == pytest.approx(48 * ROW, rel=0.12)
    assert cost.rates.of(31) - cost.rates.of(15) == pytest.approx(16 * ROW, rel=0.12)
    # Without them nothing does.
    blind = StepTimes()
    by_rows(blind, [15, 63], [120_000, 130_000])
    assert blind.rates == Rates()


def test_measured_costs_count_for_little_over_short_contexts() -> None:
    """63 nodes seem to cost 2 ms less than they do, of which contexts are no reason."""
    cost = StepTimes()
    cost.seed({nodes: {4: short(nodes)} for nodes in (15, 63)})
    for at in range(400):
        nodes, more = [15, 63][at % 2], [0.0005, 0.0025][at % 2]
        cost.observe(4, nodes, short(nodes) + more, 2000)
    assert 0 < 2000 * (cost.rates.of(63) - cost.rates.of(15)) < 0.1 * 0.002


def test_measured_costs_that_are_too_high_say_nothing_of_rows() -> None:
    """15 nodes are told to cost three times as much, which would make rows seem dear."""
    cost = StepTimes()
    cost.seed({15: {4: 3 * short(15)}, 63: {4: short(63)}})
    for at in range(400):
        nodes, context = [15, 63][at % 2], 130_000
        seconds = short(nodes) + READ * context
        cost.observe(4, nodes, seconds, context)
    assert cost.rates == Rates()


def test_the_cost_never_grows_faster_than_the_rows() -> None:
    cost = StepTimes()
    for at in range(400):
        nodes, context = NODES[at % 3], [2000, 130_000][at // 3 % 2]
        cost.observe(4, nodes, short(nodes) + 2e-11 * context * (nodes + 1) ** 2, context)
    assert cost.rates.token == 0.0
    assert cost.rates.row > 0.0


def test_rows_never_cost_less_than_nothing() -> None:
    """Noise may let contexts seem to cost less with more nodes."""
    cost = StepTimes()
    for at in range(400):
        nodes, context = NODES[at % 3], [2000, 130_000][at // 3 % 2]
        cost.observe(4, nodes, short(nodes) + context * (READ * 4 - ROW * nodes), context)
    assert cost.rates.row == 0.0
    assert cost.rates.token > READ


def test_a_number_never_seen_over_long_contexts_is_predicted_with_its_rows() -> None:
    """So is a batch size that was never seen at all."""
    times = StepTimes()
    times.seed({nodes: {4: short(nodes), 8: 2 * short(nodes)} for nodes in NODES})
    by_rows(times, [15, 63], [2000, 130_000])
    for size in (4, 8):
        for nodes in NODES:
            alone, long = times.predict(size, nodes), times.predict(size, nodes, 130_000)
            assert alone is not None
            assert long is not None
            assert long - alone == pytest.approx(130_000 * true(nodes), rel=0.12)


# --- steps --------------------------------------------------------------------------------------


def measured() -> StepTimes:
    times = StepTimes()
    times.seed({nodes: {1: seconds, 16: 2 * seconds} for (_, nodes), seconds in ALONE.items()})
    return times


@pytest.mark.parametrize("seeded", [True, False])
def test_timings_of_all_contexts_tell_the_same(seeded: bool) -> None:
    times = measured() if seeded else StepTimes()
    rng = random.Random(2)
    for _ in range(600):
        kind, tokens = rng.choice([(1, 0), (1, 31)]), rng.choice([500, 30_000, 120_000])
        seconds = step(kind, tokens, rng)
        times.observe(*kind, seconds, tokens)
    for kind in ((1, 0), (1, 31)):
        for tokens in (500, 60_000, 120_000):
            expected = ALONE[kind] + PER_TOKEN * tokens
            assert times.predict(*kind, tokens) == pytest.approx(expected, rel=0.08)
    assert times.least(1, 31, 60_000) == pytest.approx(ALONE[1, 31] + 60_000 * PER_TOKEN, rel=0.08)
    # The control: without the contexts, short ones hide what long ones take.
    blind = measured() if seeded else StepTimes()
    for _ in range(600):
        tokens = rng.choice([500, 500, 120_000])
        blind.observe(1, 31, step((1, 31), tokens, rng))
    predicted = blind.predict(1, 31)
    assert predicted is not None
    assert predicted < 0.7 * (ALONE[1, 31] + PER_TOKEN * 120_000)


def test_timings_from_before_the_slope_was_known_are_read_with_it() -> None:
    times = measured()
    for _ in range(100):
        times.observe(1, 31, ALONE[1, 31] + PER_TOKEN * 60_000, 60_000)
    assert times.predict(1, 31, 500) == pytest.approx(ALONE[1, 31] + PER_TOKEN * 60_000, rel=0.1)
    told(times, [(1, 0)], [500, 60_000], 100)
    assert times.predict(1, 31, 500) == pytest.approx(ALONE[1, 31], rel=0.1)

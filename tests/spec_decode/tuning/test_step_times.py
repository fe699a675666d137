"""Predictions of how long steps take, the host's part, and what numbers of nodes add."""

import random

import numpy as np
import pytest

from vllm_graft.spec_decode.tuning.step_times import DOUBT, Point, Shared, StepTimes, with_host


def seeded() -> StepTimes:
    times = StepTimes()
    times.seed({0: {1: 0.004, 8: 0.005}, 7: {1: 0.006, 8: 0.008}})
    return times


def test_between_the_sizes_that_were_measured() -> None:
    times = seeded()
    assert times.predict(1, 7) == 0.006
    assert times.predict(8, 7) == 0.008
    assert times.predict(4, 0) == pytest.approx(0.004 + 0.001 * 3 / 7)
    # This batch is larger than any measured one, and this number was not measured.
    assert times.predict(16, 7) is None
    assert times.predict(1, 3) is None


def test_what_all_take_more_counts_for_all() -> None:
    times = seeded()
    for _ in range(200):
        times.observe(8, 7, 0.010)
    assert times.predict(8, 7) == pytest.approx(0.010, abs=1e-4)
    assert times.predict(8, 0) == pytest.approx(0.007, abs=2e-4)
    assert times.predict(1, 7) == 0.006


def test_few_bad_times_rule_nothing_out() -> None:
    times = seeded()
    for _ in range(200):
        times.observe(8, 0, 0.005)
    for _ in range(5):
        times.observe(8, 7, 0.1)
    predicted = times.predict(8, 7)
    assert predicted is not None
    assert predicted < 0.012


def test_a_number_of_its_own_kind_is_learned() -> None:
    """Long contexts slow down steps of many nodes more than others."""
    times = seeded()
    for _ in range(600):
        times.observe(8, 0, 0.005)
        times.observe(8, 7, 0.011)
    predicted = times.predict(8, 7)
    assert predicted is not None
    assert predicted > 0.010


def test_old_times_are_forgotten() -> None:
    times = seeded()
    for _ in range(100):
        times.observe(8, 7, 0.012)
    for _ in range(20_000):
        times.observe(8, 0, 0.005)
    assert times.predict(8, 7) == pytest.approx(0.008, abs=2e-4)


def test_without_measured_costs_what_was_seen() -> None:
    times = StepTimes()
    assert times.predict(1, 7) is None
    for seconds in (0.02, 0.01, 0.01, 0.01):
        times.observe(1, 7, seconds)
    assert times.predict(1, 7) == 0.01
    assert times.least(2, 7) == 0.01
    # A number that was tried little and long ago is tried again.
    for _ in range(1000):
        times.observe(1, 0, 0.005)
    assert times.predict(1, 7) is None
    assert times.predict(1, 0) == 0.005


def test_shorter_steps_prove_a_cost_wrong() -> None:
    """Two are enough, and the other numbers keep their costs. Longer ones may be a hiccup."""
    times = seeded()
    for seconds in (0.005, 0.0051):
        times.observe(8, 7, seconds)
    predicted = times.predict(8, 7)
    assert predicted is not None
    assert 0.005 < predicted < 0.0056
    assert times.predict(8, 0) == 0.005
    assert times.judged(8) == {7: True}
    longer = seeded()
    for _ in range(2):
        longer.observe(8, 7, 0.011)
    assert longer.judged(8) == {7: False}


def test_one_step_or_a_little_noise_proves_nothing() -> None:
    times = seeded()
    times.observe(8, 7, 0.005)
    assert times.judged(8) == {}
    # Nor does a short one behind one that the host held up.
    times.observe(8, 7, 0.012)
    assert times.judged(8) == {7: False}
    times.observe(8, 7, 0.005)
    assert times.judged(8) == {7: True}
    times = seeded()
    for seconds in (0.0049, 0.0048, 0.0051, 0.0050):
        times.observe(8, 0, seconds)
    assert times.judged(8) == {0: False}


def test_many_longer_steps_prove_it_once_another_number_was_timed() -> None:
    times = seeded()
    for _ in range(100):
        times.observe(8, 7, 0.012)
    # Alone they may as well be what all steps take more.
    assert times.judged(8) == {7: False}
    for _ in range(100):
        times.observe(8, 0, 0.005)
    assert times.judged(8) == {7: True, 0: True}
    assert times.predict(8, 7) == pytest.approx(0.012, rel=0.03)
    assert times.predict(8, 0) == pytest.approx(0.005, rel=0.06)


def test_a_mended_cost_counts_beside_prompts() -> None:
    times = seeded()
    for _ in range(4):
        times.observe(8, 7, 0.005)
    for nodes, cost in ((0, 0.005), (7, 0.008)):
        alone, beside = (times.predict(8, nodes, prompts=prompts) for prompts in (False, True))
        assert alone == beside
        assert (alone == cost) is (nodes == 0)
    for _ in range(100):
        times.observe(8, 0, 0.009, prompts=True)
    alone, beside = (times.predict(8, 7, prompts=prompts) or 0 for prompts in (False, True))
    assert beside - alone == pytest.approx(0.004, rel=0.1)
    assert times.added(8) == pytest.approx(0.004, rel=0.1)


COSTS = {0: 1.0, 7: 1.5, 15: 2.0, 63: 4.0}
HOST, ADDED = 3.0, 0.2


def timed(
    *node_counts: int, host: float = HOST, added: float = ADDED
) -> list[tuple[float, float, float]]:
    """What steps took in which the device works on one while the host prepares the next."""
    costs = [COSTS[nodes] for nodes in node_counts]
    return [(0.5, cost, max(host, cost + added)) for cost in costs]


NONE = Shared()
"""There is no host: what all take more is returned as it was given."""


@pytest.mark.parametrize("known", [(0, 63), (7, 15, 63), (0, 7, 15, 63)])
def test_two_numbers_tell_the_hosts_time_from_the_devices(known: tuple[int, ...]) -> None:
    found = with_host(NONE, timed(*known))
    assert (found.level, found.host) == pytest.approx((ADDED, HOST))
    for nodes, cost in COSTS.items():
        assert found.seconds(nodes, cost) == pytest.approx(max(HOST, cost + ADDED)), nodes


@pytest.mark.parametrize("known", [(7,), (0, 7, 15)])
def test_where_only_the_host_was_seen_more_nodes_seem_free(known: tuple[int, ...]) -> None:
    found = with_host(NONE, timed(*known))
    assert found.seconds(15, COSTS[15]) == pytest.approx(HOST)
    assert HOST < found.seconds(63, COSTS[63]) < HOST + COSTS[63]


@pytest.mark.parametrize("added", [0.0, 0.2, 3.0])
@pytest.mark.parametrize("known", [(0, 63), (7, 15), (0, 7, 15, 63)])
def test_a_device_that_is_slower_has_no_host(known: tuple[int, ...], added: float) -> None:
    assert with_host(NONE, timed(*known, host=0.0, added=added)) is NONE


def test_nothing_is_below_a_step_that_took_less() -> None:
    """What took long for another reason is no time of the host."""
    disturbed = (0.1, COSTS[15], 22.0)
    assert with_host(NONE, [*timed(0, host=0.0), disturbed]) is NONE
    # Alone it is taken for the host's, until another number was tried.
    assert with_host(NONE, [disturbed]).host == pytest.approx(22.0)
    assert with_host(NONE, []) is NONE


def test_noise_of_a_large_model_is_no_host() -> None:
    noisy = [(0.5, 6.5, 7.4), (0.5, 7.0, 7.3), (0.5, 9.5, 10.1)]
    assert with_host(NONE, noisy) is NONE


def host_seeded() -> StepTimes:
    times = StepTimes()
    times.seed({nodes: {1: cost} for nodes, cost in COSTS.items()})
    return times


def test_times_are_predicted_by_the_host() -> None:
    times = host_seeded()
    for _ in range(100):
        times.observe(1, 7, HOST)
    assert times.predict(1, 15) == pytest.approx(HOST)
    assert times.predict(1, 0) == pytest.approx(HOST)
    for _ in range(100):
        times.observe(1, 63, 4.2)
    for nodes, cost in COSTS.items():
        assert times.predict(1, nodes) == pytest.approx(max(HOST, cost + 0.2)), nodes


def test_a_host_far_slower_than_the_device_is_no_hiccup() -> None:
    times = host_seeded()
    for _ in range(5):
        times.observe(1, 0, 4.5)
    assert times.predict(1, 0) == pytest.approx(4.5)
    predicted = times.predict(1, 63)
    assert predicted is not None
    assert predicted < 5.1


def test_prompts_come_on_top_of_the_host() -> None:
    times = host_seeded()
    for _ in range(100):
        times.observe(1, 7, HOST)
        times.observe(1, 63, 4.2)
        times.observe(1, 7, HOST + 10, prompts=True)
    found = {nodes: times.predict(1, nodes, prompts=True) or 0.0 for nodes in COSTS}
    # What was timed has a correction of its own besides.
    assert found[0] == pytest.approx(found[15])
    assert found[63] - found[15] == pytest.approx(4.2 - HOST)
    assert found[7] == pytest.approx(HOST + 10, rel=0.05)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_slope_is_ridge_regression(count: int) -> None:
    rng = random.Random(count)
    points = [Point(rng.random(), nodes, 0.0, rng.gauss(0, 1)) for nodes in range(1, count + 1)]
    weights, nodes, _, seconds = map(np.array, zip(*points))
    places = np.log2(nodes + 1)
    found = Shared.of(points, sloped=True)
    middle = np.average(places, weights=weights)
    # Least squares of the centred points, with one more row that pulls the slope to 0.
    rows = np.append(np.sqrt(weights) * (places - middle), np.sqrt(DOUBT))
    wanted = np.append(np.sqrt(weights) * seconds, 0.0)
    [slope], *_ = np.linalg.lstsq(rows[:, None], wanted, rcond=None)
    assert found.middle == pytest.approx(middle)
    assert found.rise == pytest.approx(slope)
    assert found.level == pytest.approx(np.dot(weights, seconds) / (weights.sum() + DOUBT))
    assert Shared.of(points) == Shared(found.level)


def test_one_number_has_no_slope_and_none_has_no_correction() -> None:
    one = [Point(0.5, 7, 0.0, 2.0)]
    assert Shared.of(one, sloped=True) == Shared(2.0 * 0.5 / (0.5 + DOUBT), middle=3.0)
    assert Shared.of([], sloped=True) == Shared()

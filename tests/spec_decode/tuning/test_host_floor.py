from __future__ import annotations

import pytest

from vllm_graft.spec_decode.tuning.excess import Floor, Timed
from vllm_graft.spec_decode.tuning.step_times import StepTimes

COSTS = {0: 1.0, 7: 1.5, 15: 2.0, 63: 4.0}
HOST, ADDED = 3.0, 0.2


def timed(*node_counts: int, host: float = HOST, added: float = ADDED) -> list[Timed]:
    """What steps took in which the device works on one while the host prepares the next."""
    return [
        Timed(0.5, COSTS[nodes], max(host, COSTS[nodes] + added) - COSTS[nodes])
        for nodes in node_counts
    ]


@pytest.mark.parametrize("known", [(0, 63), (7, 15, 63), (0, 7, 15, 63)])
def test_two_numbers_tell_the_hosts_time_from_the_devices(known: tuple[int, ...]) -> None:
    floor = Floor.under(timed(*known))
    assert floor == pytest.approx((ADDED, HOST))
    for nodes, cost in COSTS.items():
        assert cost + floor.beyond(cost) == pytest.approx(max(HOST, cost + ADDED)), nodes


@pytest.mark.parametrize("known", [(7,), (0, 7, 15)])
def test_where_only_the_host_was_seen_more_nodes_seem_free(known: tuple[int, ...]) -> None:
    floor = Floor.under(timed(*known))
    assert COSTS[15] + floor.beyond(COSTS[15]) == pytest.approx(HOST)
    assert HOST < COSTS[63] + floor.beyond(COSTS[63]) < HOST + COSTS[63]


@pytest.mark.parametrize("added", [0.0, 0.2, 3.0])
@pytest.mark.parametrize("known", [(0, 63), (7, 15), (0, 7, 15, 63)])
def test_a_device_that_is_slower_has_no_floor(known: tuple[int, ...], added: float) -> None:
    assert Floor.under(timed(*known, host=0.0, added=added)) == Floor()


def test_nothing_is_below_a_step_that_took_less() -> None:
    """What took long for another reason is no floor of the others."""
    disturbed = Timed(0.1, COSTS[15], 20.0)
    assert Floor.under([*timed(0, host=0.0), disturbed]) == Floor()
    # Alone it is taken for the host's, until another number was tried.
    assert Floor.under([disturbed]).seconds == pytest.approx(22.0)
    assert Floor.under([]) == Floor()


def test_noise_of_a_large_model_is_no_floor() -> None:
    noisy = [Timed(0.5, 6.5, 0.9), Timed(0.5, 7.0, 0.3), Timed(0.5, 9.5, 0.6)]
    assert Floor.under(noisy) == Floor()


def seeded(*, prompts: bool = False, of: StepTimes | None = None) -> StepTimes:
    times = StepTimes(prompts=prompts, slope_of=of)
    times.seed({nodes: {1: cost} for nodes, cost in COSTS.items()})
    return times


def test_times_are_predicted_by_the_floor() -> None:
    times = seeded()
    for _ in range(100):
        times.observe(1, 7, HOST)
    assert times.predict(1, 15) == pytest.approx(HOST)
    assert times.predict(1, 0) == pytest.approx(HOST)
    for _ in range(100):
        times.observe(1, 63, 4.2)
    assert times.floor(1).seconds == pytest.approx(HOST)
    for nodes, cost in COSTS.items():
        assert times.predict(1, nodes) == pytest.approx(max(HOST, cost + 0.2)), nodes


def test_a_host_far_slower_than_the_device_is_no_hiccup() -> None:
    times = seeded()
    for _ in range(5):
        times.observe(1, 0, 4.5)
    assert times.floor(1).seconds == pytest.approx(4.5)
    predicted = times.predict(1, 63)
    assert predicted is not None
    assert predicted < 5.1


def test_prompts_come_on_top_of_the_floor() -> None:
    alone = seeded()
    beside = seeded(prompts=True, of=alone)
    for _ in range(100):
        alone.observe(1, 7, HOST)
        alone.observe(1, 63, 4.2)
        beside.observe(1, 7, HOST + 10)
    found = {nodes: beside.predict(1, nodes) or 0.0 for nodes in COSTS}
    # What was timed has a correction of its own besides.
    assert found[0] == pytest.approx(found[15])
    assert found[63] - found[15] == pytest.approx(4.2 - HOST)
    assert found[7] == pytest.approx(HOST + 10, rel=0.05)

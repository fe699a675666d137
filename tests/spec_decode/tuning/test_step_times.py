"""Predictions of how long steps take."""

from __future__ import annotations

import pytest

from vllm_graft.spec_decode.tuning.step_times import StepTimes


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
    assert predicted < 0.0095


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
    assert longer.mend(8, 7) == 0.0
    assert longer.judged(8) == {7: False}


def test_one_step_or_a_little_noise_proves_nothing() -> None:
    times = seeded()
    times.observe(8, 7, 0.005)
    assert times.judged(8) == {}
    assert times.mend(8, 7) == 0.0
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
    alone = seeded()
    beside = StepTimes(prompts=True, slope_of=alone)
    beside.seed(alone.costs)
    before = beside.predict(8, 7)
    for _ in range(4):
        alone.observe(8, 7, 0.005)
    assert before is not None
    assert beside.predict(8, 7) == pytest.approx(before + alone.mend(8, 7))
    assert alone.mend(8, 7) < -0.002

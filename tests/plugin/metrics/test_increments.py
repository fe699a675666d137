"""Increments of numbers that count since the start."""

import random

from tests.plugin.metrics.stand_ins import ROWS
from vllm_graft.metrics.relay import Increments


def test_counters_add_up_gauges_replace_and_the_rest_is_passed_over() -> None:
    increments = Increments(ROWS)
    first = {"done": 3, "room": 8, "no": {"late": 1}}
    assert increments.take({**first, "unknown": 5}) == first
    assert increments.take(first) == {}
    found = increments.take({"done": 5, "room": 2, "no": {"late": 1, "full": 4}})
    assert found == {"done": 2, "room": 2, "no": {"full": 4}}


def test_a_gauge_of_zero_is_told_once() -> None:
    increments = Increments(ROWS)
    assert increments.take({"room": 0}) == {"room": 0}
    assert increments.take({"room": 0}) == {}


def test_a_process_that_began_anew_loses_nothing() -> None:
    increments = Increments(ROWS)
    increments.take({"done": 7, "no": {"late": 5}})
    assert increments.take({"done": 2, "no": {"late": 0}}) == {"done": 2}
    assert increments.take({"done": 3, "no": {"late": 4}}) == {"done": 1, "no": {"late": 4}}


def test_increments_of_random_counts_add_up_to_the_counts() -> None:
    numbers, increments = random.Random(3), Increments(ROWS)
    count, labelled = 0, {"a": 0, "b": 0}
    total, by_label = 0, {"a": 0, "b": 0}
    for _ in range(200):
        count += numbers.randrange(3)
        labelled[numbers.choice("ab")] += numbers.randrange(2)
        news = increments.take({"done": count, "no": dict(labelled)})
        total += news.get("done", 0)  # type: ignore[operator]
        for label, amount in news.get("no", {}).items():  # type: ignore[union-attr]
            by_label[label] += amount
    assert (total, by_label) == (count, labelled)

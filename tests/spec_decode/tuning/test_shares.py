"""Shares of a step's rows: which requests get nodes, and what that yields in mixed batches."""

import itertools
from typing import Any

import numpy as np
import pytest

from tests.support.worlds.mixed_world import MAX_ROWS, Engine, gain, make
from vllm_graft.spec_decode.tuning.shares import POWER, Share, Shares

DEPTHS = {7: 7, 15: 8}
LEVELS = {7: {1: 0.001, 8: 0.002}, 15: {1: 0.0015, 8: 0.003}}
ROWS = {8: 0.005, 16: 0.0055, 32: 0.006, 64: 0.009}


class Known:
    """Stands for `RequestTexts`: requests of two kinds, whose nodes yield what is given."""

    def __init__(self, kinds: dict[str, int], *curves: float) -> None:
        self.latest = list(kinds)
        self._kinds = kinds
        self._yields = np.array([np.cumsum([0.0, *(c**n for n in range(1, 64))]) for c in curves])

    def kinds(self, names: Any) -> Any:
        return np.array([self._kinds.get(name, 0) for name in names])

    def yields(self, levels: int, miss: float) -> Any:
        return self._yields


def shares(kinds: dict[str, int], *curves: float) -> Shares:
    return Shares(ROWS, LEVELS, DEPTHS, texts=Known(kinds, *curves))  # type: ignore[arg-type]


def best_of(chooser: Shares, looks: int = 4) -> Share:
    found = [chooser.best(4, [7, 15], 0.3, 0.001) for _ in range(looks)]
    assert found[-1] is not None
    return found[-1]


def test_a_share_is_the_best_of_all() -> None:
    """The reference tries every number of nodes for each kind."""
    kinds = {"a": 0, "b": 0, "c": 1, "d": 1}
    share, best = best_of(shares(kinds, 0.5, 0.95)), 0.0
    sums = [np.cumsum([0.0, *(c**n for n in range(1, 64))]) for c in (0.5, 0.95)]
    for nodes, few, many in itertools.product(LEVELS, range(1, 16), range(1, 16)):
        rows = 2 * (few + many) + 4
        if max(few, many) > nodes or rows > max(ROWS):
            continue
        seconds = ROWS[min(size for size in ROWS if size >= rows)] + 0.001
        seconds += {7: 0.001, 15: 0.0015}[nodes] * (1 + 3 / 7)
        worth = sum(2 * (1 + each) ** POWER for each in (sums[0][few], sums[1][many]))
        best = max(best, worth / seconds**POWER)
    assert share.worth / share.seconds**POWER == pytest.approx(best, rel=1e-4)
    widths = share.of(["a", "b", "c", "d", "new"], MAX_ROWS)
    assert widths[0] == widths[1] < widths[2] == widths[3] <= share.nodes
    assert widths[4] == widths[0], "of one that is not known, those of its kind"


def test_requests_that_are_alike_have_no_share() -> None:
    assert shares({"a": 1, "b": 1}, 0.5, 0.9).best(2, [7], 0.3, 0.0) is None
    # Nor is there one without costs of levels, or without a graph of two rows for each.
    assert shares({"a": 0, "b": 1}, 0.5, 0.9).best(2, [3], 0.3, 0.0) is None
    crowd = shares({str(n): n % 2 for n in range(40)}, 0.5, 0.9).best(8, [7], 0.3, 0.0)
    assert crowd is None or crowd.worth < 0


def test_more_requests_than_a_share_was_made_for_stay_within_the_rows() -> None:
    share = Share(15, {"a": 15, "b": 2}, 7, 1.0, 1.0)
    assert share.of(["a", "b", "c"], 64) == [15, 2, 7]
    assert share.of(["a", "b", "c"], 24) == [7, 2, 7]
    names = [str(number) for number in range(12)]
    assert sum(share.of(["a", *names], 64)) + 13 <= 64
    assert share.of(["a", *names], 13) == [0] * 13


def test_what_shares_take_longer_than_expected_is_learned() -> None:
    chooser = shares({"a": 0, "b": 1}, 0.5, 0.9)
    share = best_of(chooser)
    for _ in range(3):
        chooser.took(2, share, share.seconds + 0.004)
    assert chooser.beyond(2) == 0.0, "three steps prove nothing"
    for _ in range(9):
        chooser.took(2, share, share.seconds + 0.001)
    assert chooser.beyond(2) == pytest.approx(0.001)
    assert chooser.beyond(4) == 0.0


@pytest.mark.parametrize(
    ("batch", "least"),
    [
        (16, 1.1),
        pytest.param(4, 0.995, marks=pytest.mark.nightly),
        pytest.param(32, 1.1, marks=pytest.mark.nightly),
        pytest.param(64, 0.995, marks=pytest.mark.nightly),
    ],
)
def test_edits_and_chats_in_one_batch(batch: int, least: float) -> None:
    assert gain(batch, ["edit", "chat"], 1200) > least


@pytest.mark.parametrize("kind", ["chat", pytest.param("edit", marks=pytest.mark.nightly)])
def test_requests_of_one_kind_lose_nothing(kind: str) -> None:
    ratios = [gain(16, [kind], 1200, seed) for seed in range(3)]
    assert sum(ratios) / len(ratios) > 0.995


def test_control_without_costs_of_parts_there_are_no_shares() -> None:
    assert make(shares=False).shares is None
    assert Engine(16, ["edit", "chat"]).serve(make(shares=False), 200).shared == 0.0
    assert Engine(16, ["edit", "chat"]).serve(make(), 800).shared > 0.3


def test_steps_of_requests_that_are_alike_are_timed_as_ever() -> None:
    tuner = make()
    told = tuner.times.predict(4, 7)
    assert told is not None
    for _ in range(60):
        tuner.observe(7, [3, 3, 3, 3], told + 0.002, names=["a", "b", "c", "d"])
    assert tuner.times.predict(4, 7) == pytest.approx(told + 0.002, rel=0.05)
    assert not tuner.times._seen.keys() - {(4, False)}
    # Those of shares tell by how much these take longer.
    share = Share(7, {"a": 7}, 1, 0.01, 9.0)
    for _ in range(12):
        tuner.observe(7, [3, 3], 0.015, names=["a", "b"], widths=[7, 1], share=share)
    assert tuner.shares is not None
    assert tuner.shares.beyond(2) == pytest.approx(0.005)
    assert not tuner.times._seen.keys() - {(4, False)}

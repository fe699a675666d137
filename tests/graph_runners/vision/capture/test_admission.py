"""The choice of keys that get a graph: counts, decay, refusals."""

from __future__ import annotations

from vllm_graft.graph_runners.vision.capture.admission import Admission


def test_a_key_is_wanted_when_it_was_seen_often_enough() -> None:
    policy: Admission[str] = Admission(min_hits=2)
    policy.see(["a", "b"])
    assert not policy.wants("a")
    policy.see(["a"])
    assert policy.wants("a")
    assert not policy.wants("b")
    policy.refuse("a", "mismatch")
    assert not policy.wants("a")


def test_counts_decay() -> None:
    policy: Admission[str] = Admission(min_hits=2, half_life=4)
    policy.refuse("now", "no_room", for_now=True)
    policy.refuse("ever", "mismatch")
    for _ in range(3):
        policy.see(["a", "a"])
    assert policy.wants("a")
    policy.see([])
    assert policy.wants("a")  # A count of 6 became 3.
    for _ in range(4):
        policy.see(["b"])
    assert not policy.wants("a")
    assert policy.refused == {"ever": "mismatch"}


def test_only_a_colder_key_is_a_victim() -> None:
    policy: Admission[str] = Admission(min_hits=1)
    policy.see(["hot"] * 5 + ["cold"] + ["new"] * 2)
    assert policy.victim(["hot", "cold"], "new") == "cold"
    assert policy.victim(["hot"], "new") is None
    policy.see(["cold"])
    assert policy.victim(["cold"], "new") is None  # Counts are equal, so the old key stays.
    assert policy.victim([], "new") is None


def test_the_hottest_key_is_the_one_that_was_seen_most() -> None:
    policy: Admission[str] = Admission(min_hits=1)
    policy.see(["hot"] * 5 + ["warm"] * 3 + ["also"] * 3 + ["bad"] * 9)
    policy.refuse("bad", "mismatch")
    assert policy.is_hottest("hot", [])
    assert not policy.is_hottest("warm", [])
    assert policy.is_hottest("warm", ["hot"])
    assert policy.is_hottest("also", ["hot"])

"""Captures: the keys that get a graph, the wall time that they take, and the back ends."""

import gc

import pytest
import torch

from tests.support.vision.fake_backend import FakeBackend
from vllm_graft.base.errors import GraftError
from vllm_graft.config import VitConfig
from vllm_graft.graph_runners.vision.capture.admission import Admission, TimeShare
from vllm_graft.graph_runners.vision.capture.graph_backend import make_backend, no_gc

CPU = torch.device("cpu")


def test_a_key_is_wanted_when_it_was_seen_often_enough() -> None:
    policy: Admission[str] = Admission(min_hits=2)
    policy.see(["a", "b"])
    assert not policy.wants("a")
    policy.see(["a"])
    assert (policy.wants("a"), policy.wants("b")) == (True, False)
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
    assert [policy.is_hottest(key, []) for key in ("hot", "warm")] == [True, False]
    assert all(policy.is_hottest(key, ["hot"]) for key in ("warm", "also"))


@pytest.mark.parametrize("cost", [0.02, 0.05, 0.3])
def test_captures_stay_within_their_share_from_the_first_second_on(cost: float) -> None:
    rate = TimeShare(share=VitConfig().capture_share, burst=0.2)
    assert rate.share < 0.02
    rate.start(100.0)
    now, spent, worst = 0.0, 0.0, 0.0
    for _ in range(20000):
        if rate.ready(100.0 + now):
            rate.spent(cost)
            spent += cost
            now += cost
            worst = max(worst, spent - 0.02 * now)
        now += 0.005
    # The length of the first capture is not known, and credit never exceeds the burst.
    assert worst <= max(0.0, cost - 0.05)
    assert spent >= 0.9 * 0.019 * now - cost


def test_an_unusually_long_capture_is_paid_back() -> None:
    rate = TimeShare(share=0.02, burst=0.2)
    rate.start(0.0)
    assert not rate.ready(2.4)
    assert rate.ready(2.6)
    rate.spent(0.15)
    assert not rate.ready(12.4)  # It owes 0.1 seconds, and then needs credit for the next.
    assert rate.ready(15.1)


def test_credit_of_an_idle_time_is_bounded() -> None:
    rate = TimeShare(share=0.01, burst=0.2)
    rate.start(0.0)
    assert not rate.plenty
    captures = 0
    while rate.ready(1e6):
        assert rate.plenty == (captures == 0)
        rate.spent(0.05)
        captures += 1
    assert captures == 4


def test_no_share_is_never_and_all_of_it_always() -> None:
    assert not TimeShare(0.0).ready(1e9)
    everything = TimeShare(1.0)
    everything.start(0.0)
    everything.spent(10.0)
    assert everything.ready(0.0)
    assert everything.plenty


def test_a_capture_longer_than_the_burst_happens() -> None:
    rate = TimeShare(share=0.1, burst=0.2)
    rate.spent(1.0)
    assert not rate.ready(0.0)
    assert rate.ready(20.0)


def test_the_fake_runs_the_region_on_its_tensors() -> None:
    backend = FakeBackend(CPU)
    cell, factor = torch.ones(2), [2.0]
    captured = backend.capture(lambda: cell * factor[0])
    kept = captured.output
    cell.fill_(5)
    captured.replay()
    assert kept.tolist() == [10, 10]
    assert backend.reserved() == kept.nbytes == 8
    captured.reset()
    with pytest.raises(GraftError):
        captured.replay()


def test_garbage_is_not_collected_under_capture() -> None:
    assert gc.isenabled()
    with no_gc():
        assert not gc.isenabled()
        with no_gc():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(GraftError, match="no CUDA graphs on the device cpu"):
        make_backend(CPU)

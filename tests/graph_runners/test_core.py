"""The core of graph runners: policy, budget, shared buffers, the pretended back end."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_graft.base.errors import GraftError
from vllm_graft.graph_runners.vision.capture.admission import Admission
from vllm_graft.graph_runners.vision.capture.allocator import MIB, scratch_bytes, segment_bytes
from vllm_graft.graph_runners.vision.capture.arena import Arena
from vllm_graft.graph_runners.vision.capture.backends import make_backend
from vllm_graft.graph_runners.vision.capture.budget import ByteBudget
from vllm_graft.graph_runners.vision.capture.cuda_backend import no_gc
from vllm_graft.graph_runners.vision.capture.fake_backend import FakeBackend
from vllm_graft.graph_runners.vision.capture.rate import Never, TimeShare
from vllm_graft.graph_runners.vision.capture.slab import ALIGNMENT, Slab
from vllm_graft.graph_runners.vision.capture.tensor_cache import TensorCache, num_bytes
from vllm_graft.graph_runners.vision.vision_config import VitConfig

CPU = torch.device("cpu")


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
    assert policy.wants("a")  # 6 became 3
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
    assert policy.victim(["cold"], "new") is None  # Alike: it stays.
    assert policy.victim([], "new") is None


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
    # Nobody knows the first one's length, nor saves up for one longer than the burst.
    assert worst <= max(0.0, cost - 0.05)
    assert spent >= 0.9 * 0.019 * now - cost


def test_an_unusually_long_capture_is_paid_back() -> None:
    rate = TimeShare(share=0.02, burst=0.2)
    rate.start(0.0)
    assert not rate.ready(2.4)
    assert rate.ready(2.6)
    rate.spent(0.15)
    assert not rate.ready(12.4)  # 0.1 of debt, and as much again to save up.
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
    assert not Never().ready(1e9)
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


def test_the_hottest_key_is_the_one_that_was_seen_most() -> None:
    policy: Admission[str] = Admission(min_hits=1)
    policy.see(["hot"] * 5 + ["warm"] * 3 + ["also"] * 3 + ["bad"] * 9)
    policy.refuse("bad", "mismatch")
    assert policy.is_hottest("hot", [])
    assert not policy.is_hottest("warm", [])
    assert policy.is_hottest("warm", ["hot"])
    assert policy.is_hottest("also", ["hot"])


def test_budget() -> None:
    budget = ByteBudget(100)
    budget.set("a", 30)
    budget.add("a", 10)
    budget.set("b", 50)
    assert (budget.used, budget.free) == (90, 10)
    assert (budget.of("a"), budget.of("nobody")) == (40, 0)
    assert budget.owners == {"a": 40, "b": 50}
    budget.drop("a")
    assert budget.free == 50
    budget.add("c", 60)
    assert budget.free == -10
    budget.clear()
    assert budget.used == 0


def test_arena_shares_rows_and_keeps_what_was_handed_out() -> None:
    arena = Arena(CPU)
    like = torch.empty(1, 3)
    large = arena.rows("pixels", 8, like)
    small = arena.rows("pixels", 4, like)
    assert small.data_ptr() == large.data_ptr()
    assert arena.bytes == 8 * 3 * 4
    assert arena.rows("pixels", 4, like.double()).data_ptr() != large.data_ptr()
    assert arena.missing("pixels", 8, like) == 0
    assert arena.missing("pixels", 9, like) == 9 * 3 * 4
    larger = arena.rows("pixels", 9, like)
    large.fill_(1)
    assert larger.eq(0).all()
    assert arena.bytes == (8 + 9) * 12 + 4 * 24
    assert sorted(arena.sizes) == [4 * 24, 8 * 12, 9 * 12]
    arena.clear()
    assert arena.sizes == []


def test_tensors_take_segments() -> None:
    assert segment_bytes([]) == 0
    assert segment_bytes([1]) == segment_bytes([MIB, MIB]) == 2 * MIB
    assert segment_bytes([MIB, MIB, 1]) == 4 * MIB
    assert segment_bytes([MIB + 1]) == segment_bytes([9 * MIB] * 2) == 20 * MIB
    assert segment_bytes([9 * MIB] * 2 + [4 * MIB, 8]) == 42 * MIB
    assert segment_bytes([10 * MIB]) == 10 * MIB
    assert segment_bytes([33 * MIB + 1]) == 34 * MIB
    assert scratch_bytes(0) == scratch_bytes(MIB) == 4 * MIB
    assert scratch_bytes(MIB + 1) == scratch_bytes(20 * MIB) == 24 * MIB
    assert scratch_bytes(20.5 * MIB) == 44 * MIB


def test_the_cache_keeps_what_is_asked_for_most() -> None:
    cache = TensorCache(limit=24)
    for key in "abc":
        assert cache.get(key) is None
        assert cache.put(key, {"x": torch.ones(2)})
    assert cache.bytes == 24
    assert cache.get("a") is not None
    assert not cache.put("d", {"x": torch.ones(2)})
    assert cache.get("d") is None
    assert not cache.evict_for("d")  # Asked for once, as was the least of the others.
    cache.get("d")
    assert cache.evict_for("d") == "b"
    assert cache.put("d", {"x": torch.ones(2)})
    assert cache.get("b") is None
    assert cache.get("a")["x"].tolist() == [1, 1]
    assert cache.bytes == 24
    cache.clear()
    assert cache.bytes == 0
    assert not cache.evict_for("a")


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=60))
def test_ranges_of_a_slab_do_not_overlap(steps: list[tuple[bool, int]]) -> None:
    slab = Slab(2048)
    taken: list[tuple[int, int]] = []
    for giving, size in steps:
        if giving and taken:
            slab.give(*taken.pop(size % len(taken)))
        elif (start := slab.take(size)) is not None:
            assert start % ALIGNMENT == 0
            assert start + size <= 2048
            assert all(start + size <= at or at + much <= start for at, much in taken)
            taken.append((start, size))
        else:
            assert slab.free < 2048
    while taken:
        slab.give(*taken.pop())
    assert slab.free == 2048
    assert slab.take(2048) == 0  # All gaps have become one.
    assert slab.take(1) is None


def test_a_turn_of_more_keys_than_fit_still_hits() -> None:
    cache = TensorCache(limit=40)  # Five of these nine; the least recently used would be none.
    hits = 0
    for turn in range(200):
        for key in range(9):
            if cache.get(key) is not None:
                hits += turn >= 100
                continue
            while cache.bytes + 8 > cache.limit and cache.evict_for(key):
                pass
            cache.put(key, torch.ones(2))
    assert hits >= 4 * 100


def test_the_fake_runs_the_region_on_its_tensors() -> None:
    backend = FakeBackend(CPU)
    cell, factor = torch.ones(2), [2.0]
    captured = backend.capture(lambda: cell * factor[0])
    kept = captured.output
    cell.fill_(5)
    captured.replay()
    assert kept.tolist() == [10, 10]
    assert backend.reserved() == num_bytes(kept) == 8
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

"""The byte budget, shared buffers, the allocator's segments, ranges of a block, cached metadata."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.vision.fake_backend import FakeBackend
from vllm_graft.graph_runners.vision.capture.device_memory import (
    MIB,
    Arena,
    ByteBudget,
    scratch_bytes,
    segment_bytes,
)
from vllm_graft.graph_runners.vision.graphs.padding_metadata import ALIGNMENT, MetadataCache, Slab

CPU = torch.device("cpu")


def test_budget() -> None:
    budget = ByteBudget(100)
    budget.owners["a"] += 40
    budget.owners["b"] = 50
    assert (budget.used, budget.free) == (90, 10)
    budget.owners["c"] += 20
    assert budget.free == -10


def test_arena_shares_rows_and_keeps_what_was_handed_out() -> None:
    arena = Arena(CPU)
    like = torch.empty(1, 3)
    large = arena.rows("pixels", 8, like)
    small = arena.rows("pixels", 4, like)
    assert small.data_ptr() == large.data_ptr()
    assert arena.sizes == [8 * 3 * 4]
    assert arena.rows("pixels", 4, like.double()).data_ptr() != large.data_ptr()
    assert arena.missing("pixels", 8, like) == 0
    assert arena.missing("pixels", 9, like) == 9 * 3 * 4
    larger = arena.rows("pixels", 9, like)
    large.fill_(1)
    assert larger.eq(0).all()
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


def test_a_turn_of_more_keys_than_fit_still_hits() -> None:
    """Five of nine keys fit; LRU would never hit."""
    backend: Any = FakeBackend(CPU)
    cache = MetadataCache(backend, 5 * ALIGNMENT)
    cache.open()
    hits = 0
    for turn in range(200):
        for key in range(9):
            if (found := cache.get(key)) is not None:
                assert found["x"].tolist() == [key, key]
                hits += turn >= 100
            else:
                cache.keep(key, {"x": torch.full((2,), float(key))})
    assert hits >= 4 * 100
    assert cache.report()["host_bytes"] == 5 * 8
    cache.clear()
    assert cache.report()["host_bytes"] == 0


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
    assert slab.take(2048) == 0  # All gaps have merged.
    assert slab.take(1) is None

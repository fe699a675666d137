"""Slots are given out once, come back, and lie together where they can."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.hicache.host.eviction import EvictionPolicy, LruPolicy
from vllm_graft.hicache.host.free_slots import FreeSlots, facing
from vllm_graft.hicache.host.index import HostIndex
from vllm_graft.hicache.pages.page_key import PageKey


def _ranges(slots: list[int]) -> int:
    return 1 + sum(after != before + 1 for before, after in pairwise(slots))


@given(count=st.integers(1, 70), data=st.data())
@settings(max_examples=150, deadline=None)
def test_each_slot_has_one_owner(count: int, data: st.DataObject) -> None:
    free, used = FreeSlots(count), set[int]()
    for _ in range(data.draw(st.integers(1, 25))):
        if used and data.draw(st.booleans()):
            back = data.draw(st.lists(st.sampled_from(sorted(used)), unique=True))
            for slot in back:
                free.give(slot)
            used.difference_update(back)
        else:
            wanted = data.draw(st.integers(0, len(free)))
            taken = free.take(wanted)
            assert len(taken) == len(set(taken)) == wanted
            assert taken == sorted(taken)
            assert used.isdisjoint(taken)
            assert set(taken) <= set(range(count))
            used.update(taken)
        assert set(free) == set(range(count)) - used
        assert len(free) == count - len(used)
        with pytest.raises(ValueError, match="are wanted"):
            free.take(len(free) + 1)
    for slot in data.draw(st.permutations(sorted(used))):
        free.give(slot)
    # In the end all slots are one range again.
    assert free.take(count) == list(range(count))


def test_a_range_is_preferred_to_holes() -> None:
    free = FreeSlots(100)
    free.take(100)
    for slot in (*range(0, 40, 2), *range(79, 59, -1), 90, 91):
        free.give(slot)
    assert free.take(20) == list(range(60, 80))
    assert free.take(2) == [90, 91]
    assert _ranges(free.take(20)) == 20


def test_single_pages_fill_holes_first() -> None:
    free = FreeSlots(64)
    free.take(32)
    free.give(3)
    assert free.take(1) == [3]
    assert _ranges([slot for _ in range(8) for slot in free.take(1)]) == 1
    assert _ranges(free.take(24)) == 1


@given(blocks=st.lists(st.integers(0, 9), max_size=20, unique=True), first=st.integers(0, 5))
def test_facing_turns_stretches_that_go_down(blocks: list[int], first: int) -> None:
    slots = list(range(first, first + len(blocks)))
    found = facing(slots, blocks)
    assert sorted(found) == slots
    pairs = list(zip(blocks, found))
    steps = [(b - a, t - s) for (a, s), (b, t) in pairwise(pairs)]
    # Neighbours on the device are neighbours on the host, in the same direction.
    assert all(host == device for device, host in steps if device == -1)
    straight = [b - a != -1 for a, b in pairwise(blocks)]
    if all(straight):
        assert found == slots
    assert facing([0, 1, 2, 3, 4, 5], [7, 8, 4, 3, 2, 9]) == [0, 1, 4, 3, 2, 5]


def _keys(count: int, seed: int) -> list[PageKey]:
    return [PageKey(bytes([seed, number]), 0) for number in range(count)]


@pytest.mark.parametrize("step", [1, -1])
def test_slots_go_the_way_that_blocks_go(step: int) -> None:
    policy: EvictionPolicy = LruPolicy(24)
    index = HostIndex(24, policy, {0: 1})
    for seed in range(4):
        blocks = list(range(40, 48))[::step]
        pages = index.reserve(_keys(8, seed), blocks=blocks)
        assert pages is not None
        assert [page.key for page in pages] == _keys(8, seed)
        slots = [page.slot for page in pages]
        # The fourth time they take the slots of evicted pages.
        assert _ranges(slots[::step]) == 1
        index.commit(pages)
    assert index.evictions == 8

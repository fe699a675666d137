"""The plan of rows that a load copies through buffers, and their places in the buffers."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.host_cache.copied_bytes import HOST, NO_LIMIT, Bytes, bytes_of, pages_of, pool_of
from vllm_graft.hicache.copies import strided
from vllm_graft.hicache.copies.staged_plan import (
    Buffers,
    StagedCopies,
    StagedPlanner,
    chunked,
    split_by_slot,
)
from vllm_graft.hicache.copies.strided import HostShard, StridedPlanner
from vllm_graft.hicache.messages.operation import CacheOperation, Direction, PoolTransfer
from vllm_graft.hicache.pages.layout import LayerPages, pages_bytes

STAGING = 1 << 50
Pairs = list[tuple[int, int]]


def _through(
    copies: StagedCopies, buffers: Buffers, begin: int = 0, end: int | None = None
) -> Bytes:
    """Return every byte that chunks bring to blocks, filling and emptying buffers in order."""
    fills, empties, found = copies.fills, copies.empties, []
    for chunk in copies.chunks[begin:end]:
        first = buffers.address + chunk.buffer * buffers.bytes
        held: dict[int, int] = {}
        for copy in range(*chunk.fill):
            assert fills.device_pitch[copy] == fills.width[copy]
            for row in range(fills.rows[copy]):
                to = int(fills.device[copy] + row * fills.device_pitch[copy])
                source = int(fills.host[copy] + row * fills.host_pitch[copy])
                for at in range(fills.width[copy]):
                    assert to + at not in held, "two bytes at one place"
                    held[to + at] = source + at
        assert min(held) >= first
        assert max(held) < first + buffers.bytes
        for run in range(*chunk.empty):
            to, source = int(empties.device[run]), int(empties.host[run])
            found += [(to + at, held.pop(source + at)) for at in range(empties.sizes[run])]
        assert not held, "bytes that go nowhere"
    return sorted(found)


_widths = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3)
_pools = st.lists(st.tuples(_widths, st.integers(0, 2), st.booleans()), min_size=1, max_size=2).map(
    lambda found: {n: pool_of(n, *args) for n, args in enumerate(found)}
)
_slots = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=4)


def _drawn(data: st.DataObject) -> Pairs:
    """Draw slots in runs, some of them twice, with blocks ascending, descending or in any order."""
    pairs: Pairs = []
    for first, rows in data.draw(_slots):
        blocks = [len(pairs) + at for at in range(rows)]
        blocks = data.draw(st.sampled_from([blocks, blocks[::-1]]) | st.permutations(blocks))
        pairs += zip(blocks, range(first, first + rows))
    return data.draw(st.just(pairs) | st.permutations(pairs))


@given(
    pools=_pools,
    data=st.data(),
    pinned=st.integers(1, 12),
    least=st.integers(2, 12),
    capacity=st.integers(1, 20),
    count=st.integers(1, 3),
)
@settings(max_examples=200, deadline=None)
def test_straight_staged_and_the_rest_are_all_bytes_once(
    pools: dict[int, list[LayerPages]],
    data: st.DataObject,
    pinned: int,
    least: int,
    capacity: int,
    count: int,
) -> None:
    slot_bytes = max(map(pages_bytes, pools.values())) + 1
    transfers = []
    for group in pools:
        pairs = _drawn(data)
        transfers.append(PoolTransfer(group, [s for _, s in pairs], [b for b, _ in pairs]))
    load = CacheOperation([3], Direction.LOAD, transfers, 5, ["r"])
    expected, by_name = pages_of(pools, load, slot_bytes)
    buffers = Buffers(STAGING, capacity, count)
    with mock.patch.object(strided, "LEAST_BYTES", least):
        shard = HostShard(HOST, slot_bytes, pinned)
        planner = StridedPlanner(pools, shard, NO_LIMIT)
        stager = StagedPlanner(planner.columns, shard, 1, buffers)
    for by_layer in (False, True):
        part = planner.plan(load, by_layer)
        rest = load if part is None else part.rest
        staged = None if rest is None else stager.plan(rest, by_layer)
        rest = rest if staged is None else staged.rest
        found = [] if part is None else bytes_of(part.copies)
        found += [] if staged is None else _through(staged.copies, buffers)
        left, left_by_name = ([], {}) if rest is None else pages_of(pools, rest, slot_bytes)
        assert sorted(found + left) == expected
        if staged is None:
            continue
        assert staged.copies.num_bytes == len(_through(staged.copies, buffers))
        if rest is not None:
            assert (rest.ids, rest.request_ids, rest.priority) == ([3], ["r"], 5)
        for name in by_name if by_layer else ():
            straight = [] if part is None else bytes_of(part.copies, *part.ranges.get(name, (0, 0)))
            span = staged.ranges.get(name, (0, 0))
            layer = straight + _through(staged.copies, buffers, *span)
            assert sorted(layer + left_by_name.get(name, [])) == by_name[name]
        fills = staged.copies.fills
        first = (fills.host - HOST) // slot_bytes // pinned
        last = (fills.host - HOST + (fills.rows - 1) * slot_bytes) // slot_bytes // pinned
        assert (first == last).all(), "a copy reaches into memory that is pinned apart"


@given(
    slots=st.lists(st.integers(0, 40), max_size=60),
    least=st.integers(1, 6),
    pinned=st.integers(1, 50),
)
@settings(max_examples=200, deadline=None)
def test_long_runs_of_slots_are_all_found(slots: list[int], least: int, pinned: int) -> None:
    blocks = list(range(100, 100 + len(slots)))
    rows, rest = split_by_slot(PoolTransfer(7, slots, blocks), least, pinned)
    taken = [] if rows is None else list(zip(rows.slots.tolist(), rows.blocks.tolist()))
    assert sorted(taken + list(zip(rest.host_indices, rest.device_indices))) == sorted(
        zip(slots, blocks)
    )
    assert rest.group == 7
    # The reference walks over all slots in order.
    runs: list[list[int]] = []
    for slot in sorted(set(slots)):
        if runs and slot == runs[-1][-1] + 1 and slot % pinned:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    long = [run for run in runs if len(run) >= least]
    assert [slot for slot, _ in taken] == [slot for run in long for slot in run]
    if rows is not None:
        assert rows.slots[rows.begins].tolist() == [run[0] for run in long]


@given(
    widths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=30), min_size=1, max_size=4),
    unit=st.integers(1, 4),
    spare=st.integers(0, 30),
)
@settings(max_examples=200, deadline=None)
def test_chunks_are_whole_rows_and_fit(widths: list[list[int]], unit: int, spare: int) -> None:
    sizes = np.array([size * unit for part in widths for size in part], np.int64)
    parts = np.zeros(len(sizes), bool)
    parts[np.cumsum([0, *map(len, widths[:-1])])] = True
    unit = int(np.gcd.reduce(sizes))
    capacity = int(sizes.max()) + spare
    length = capacity // unit * unit + unit - int(sizes.max())
    begins, offset = chunked(sizes, parts, length, unit)
    assert begins[parts].all()
    assert (offset[begins] == 0).all()
    joined = ~begins[1:]
    assert (offset[1:][joined] == (offset + sizes)[:-1][joined]).all()
    assert (offset + sizes).max() <= capacity
    if len(set(sizes.tolist())) == 1:
        # There are no more chunks than needed.
        rows = capacity // int(sizes[0])
        assert begins.sum() == sum(-(-len(part) // rows) for part in widths)


LAYER = 64 << 10
"""Bytes of K and V of a block of an 8B model."""


def _planned(pairs: Pairs, layers: int = 2, **changes: int) -> StagedCopies | None:
    """Plan copies of pairs of a block and a slot, by layers that lie apart."""
    at = {"address": 0, "capacity": 16 << 20, "pitch": LAYER} | changes
    pools = {
        0: [
            LayerPages(f"l.{n}", at["address"] + (n << 30), at["pitch"], ((0, n * LAYER, LAYER),))
            for n in range(layers)
        ]
    }
    shard = HostShard(HOST, layers * LAYER, 1 << 20)
    planner = StridedPlanner(pools, shard, NO_LIMIT)
    buffers = Buffers(STAGING, at["capacity"], 3)
    stager = StagedPlanner(planner.columns, shard, 16, buffers)
    transfer = PoolTransfer(0, [slot for _, slot in pairs], [block for block, _ in pairs])
    part = stager.plan(CacheOperation([0], Direction.LOAD, [transfer]), by_layer=True)
    assert stager.serves or part is None
    if part is None:
        return None
    assert part.rest is None
    return part.copies


def test_reversed_blocks_are_a_few_calls_a_layer() -> None:
    copies = _planned([(900 - at, 40 + at) for at in range(512)], layers=32)
    assert copies is not None
    assert copies.fills.rows.tolist() == [256] * 64
    assert [chunk.buffer for chunk in copies.chunks] == [at % 3 for at in range(64)]
    assert [len(range(*chunk.empty)) for chunk in copies.chunks] == [256] * 64


def test_runs_of_slots_share_a_chunk() -> None:
    pairs = [(500 - at, 100 * run + at) for run in range(4) for at in range(64)]
    copies = _planned(pairs, layers=1)
    assert copies is not None
    assert copies.fills.rows.tolist() == [64] * 4
    assert [chunk.fill for chunk in copies.chunks] == [(0, 4)]


def test_chunks_of_a_layer_are_about_as_long() -> None:
    copies = _planned([(900 - at, at) for at in range(513)], layers=1)
    assert copies is not None
    assert copies.fills.rows.tolist() == [171] * 3


def test_what_does_not_go_through_buffers() -> None:
    run = [(200 - at, 70 + at) for at in range(64)]
    assert _planned(run) is not None
    assert _planned(run[:31]) is None, "too short to pay"
    assert _planned([(block, 2 * slot) for block, slot in run]) is None, "no slots in a row"
    assert _planned(run, address=8) is None, "the kernel wants other addresses"
    assert _planned(run, pitch=LAYER + 8) is None
    assert _planned(run, capacity=LAYER) is not None
    assert _planned(run, capacity=LAYER - 1) is None

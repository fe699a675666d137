"""The choice of copies that are rows at equal distances, straight or through buffers."""

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
from vllm_graft.hicache.copies.strided import (
    Columns,
    HostShard,
    StridedCopies,
    StridedPlan,
    StridedPlanner,
)
from vllm_graft.hicache.messages.operation import CacheOperation, Direction, PoolTransfer
from vllm_graft.hicache.pages.layout import LayerPages, pages_bytes

_widths = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3)
_pools = st.lists(st.tuples(_widths, st.integers(0, 2), st.booleans()), min_size=1, max_size=2).map(
    lambda found: {n: pool_of(n, *args) for n, args in enumerate(found)}
)


def _planned_rows(
    pairs: list[tuple[int, int]], widths: list[list[int]], **changes: int
) -> StridedPlan | None:
    """Plan copies of pairs of a block and a slot, in a pool whose layers lie apart."""
    pools = {0: pool_of(0, widths, changes.pop("gap", 0), False)}
    slot_bytes = changes.get("slot_bytes", pages_bytes(pools[0]))
    shard = HostShard(HOST, slot_bytes, changes.get("pinned_slots", 1 << 20))
    planner = StridedPlanner(pools, shard, changes.get("max_pitch", NO_LIMIT))
    transfer = PoolTransfer(0, [slot for _, slot in pairs], [block for block, _ in pairs])
    return planner.plan(CacheOperation([0], Direction.STORE, [transfer]))


def _consecutive(block: int, slot: int, count: int) -> list[tuple[int, int]]:
    return [(block + at, slot + at) for at in range(count)]


LAYER = 64 << 10
"""Bytes of K and V of a block of an 8B model."""


def test_long_runs_are_a_copy_a_layer() -> None:
    pairs = [*_consecutive(10, 70, 32), (5, 5), *_consecutive(200, 4, 31)]
    part = _planned_rows(pairs, [[LAYER]] * 8)
    assert part is not None
    assert part.rest is not None
    assert part.copies.rows.tolist() == [32] * 8
    assert part.copies.host_pitch.tolist() == [8 * LAYER] * 8
    assert part.copies.num_bytes == 8 * strided.LEAST_BYTES
    assert sum(map(len, part.rest.transfers)) == 32


def test_the_order_of_pairs_is_of_no_account() -> None:
    pairs = _consecutive(10, 70, 40)
    for ordered in (pairs[::-1], pairs[20:] + pairs[:20], pairs[::2] + pairs[1::2]):
        part = _planned_rows(ordered, [[LAYER]])
        assert part is not None
        assert part.rest is None
        assert part.copies.rows.tolist() == [40]


def test_slots_that_go_to_two_requests_are_two_runs() -> None:
    pairs = [
        pair for both in zip(_consecutive(10, 70, 40), _consecutive(90, 70, 40)) for pair in both
    ]
    part = _planned_rows(pairs, [[LAYER]])
    assert part is not None
    assert part.rest is None
    assert part.copies.rows.tolist() == [40, 40]


def test_what_2d_copies_are_no_good_for() -> None:
    run = _consecutive(10, 70, 64)
    assert _planned_rows(run, [[LAYER]] * 2) is not None
    assert _planned_rows([(block, 200 - slot) for block, slot in run], [[LAYER]] * 2) is None
    assert _planned_rows(run[:31], [[LAYER]] * 2) is None
    assert _planned_rows(run, [[LAYER]] * 2, max_pitch=2 * LAYER - 1) is None
    assert _planned_rows(run, [[LAYER]] * 2, max_pitch=2 * LAYER) is not None
    # A page of this length is long enough for a copy of its own.
    assert _planned_rows(run, [[strided.LEAST_BYTES]] * 2) is None


def test_blocks_that_share_bytes_are_left_alone() -> None:
    pools = {0: [LayerPages("layers.0", 0, LAYER // 2, ((0, 0, LAYER),))]}
    planner = StridedPlanner(pools, HostShard(HOST, LAYER, 1 << 20), NO_LIMIT)
    pairs = PoolTransfer(0, list(range(64)), list(range(64)))
    assert planner.plan(CacheOperation([0], Direction.LOAD, [pairs])) is None


def test_adjacent_columns_are_merged_if_their_blocks_are_as_far_apart() -> None:
    for pitch, widths in ((100, [30]), (60, [10, 20])):
        layers = [
            LayerPages("layers.0", 1000, 100, ((0, 0, 10),)),
            LayerPages("layers.1", 1010, pitch, ((0, 10, 20),)),
        ]
        assert Columns.of(layers, merged=True).width.tolist() == widths
        assert Columns.of(layers).layers == {"layers.0": (0, 1), "layers.1": (1, 2)}


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
    together=st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_straight_staged_and_the_rest_are_all_bytes_once(
    pools: dict[int, list[LayerPages]],
    data: st.DataObject,
    pinned: int,
    least: int,
    capacity: int,
    count: int,
    together: int,
) -> None:
    slot_bytes = max(map(pages_bytes, pools.values())) + 1
    transfers = []
    for group in pools:
        pairs = _drawn(data)
        transfers.append(PoolTransfer(group, [s for _, s in pairs], [b for b, _ in pairs]))
    load = CacheOperation([3], Direction.LOAD, transfers, 5, ["r"])
    expected, by_name = pages_of(pools, load, slot_bytes)
    buffers = Buffers(STAGING, capacity, count)
    shard = HostShard(HOST, slot_bytes, pinned)
    names = data.draw(st.permutations(list(by_name)))
    some = [names[at : at + together] for at in range(0, len(names), together)]
    batches: list[list[list[str]]] = [[], some]
    with mock.patch.object(strided, "LEAST_BYTES", least):
        planner = StridedPlanner(pools, shard, NO_LIMIT)
        stager = StagedPlanner(planner.columns, shard, 1, buffers)
        plans = []
        for each in batches:
            part = planner.plan(load, bool(each))
            rest = load if part is None else part.rest
            plans.append((part, rest, None if rest is None else stager.plan(rest, each)))
    for each, (part, rest, staged) in zip(batches, plans):
        rest = rest if staged is None else staged.rest
        found = [] if part is None else bytes_of(part.copies)
        found += [] if staged is None else _through(staged.copies, buffers)
        left, left_by_name = ([], {}) if rest is None else pages_of(pools, rest, slot_bytes)
        assert sorted(found + left) == expected
        if part is not None:
            _check_pieces(part.copies, slot_bytes * pinned)
        if staged is None:
            continue
        _check_pieces(staged.copies.fills, slot_bytes * pinned)
        assert staged.copies.num_bytes == len(_through(staged.copies, buffers))
        if rest is not None:
            assert (rest.ids, rest.request_ids, rest.priority) == ([3], ["r"], 5)
        for batch in each:
            bytes_there, expected_there = [], []
            for name in batch:
                span = (0, 0) if part is None else part.ranges.get(name, (0, 0))
                bytes_there += [] if part is None else bytes_of(part.copies, *span)
                span = staged.ranges.get(name, (0, 0))
                bytes_there += _through(staged.copies, buffers, *span)
                bytes_there += left_by_name.get(name, [])
                expected_there += by_name[name]
            assert sorted(bytes_there) == sorted(expected_there)


def _check_pieces(copies: StridedCopies, piece: int) -> None:
    """Check that no copy reaches into memory that is pinned apart."""
    first = copies.host - HOST
    assert (first // piece == (first + (copies.rows - 1) * copies.host_pitch) // piece).all()


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


def _staged(
    pairs: Pairs, layers: int = 2, together: int = 1, **changes: int
) -> StagedCopies | None:
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
    names = [layer.name for layer in pools[0]]
    batches = [names[n : n + together] for n in range(0, layers, together)]
    part = stager.plan(CacheOperation([0], Direction.LOAD, [transfer]), batches)
    assert stager.serves or part is None
    if part is None:
        return None
    assert part.rest is None
    return part.copies


def test_reversed_blocks_are_a_few_calls_a_layer() -> None:
    copies = _staged([(900 - at, 40 + at) for at in range(512)], layers=32)
    assert copies is not None
    assert copies.fills.rows.tolist() == [256] * 64
    assert [chunk.buffer for chunk in copies.chunks] == [at % 3 for at in range(64)]
    assert [len(range(*chunk.empty)) for chunk in copies.chunks] == [256] * 64


def test_layers_that_are_copied_together_are_one_row_of_a_slot() -> None:
    pairs = [(900 - at, 40 + at) for at in range(24)]
    assert _staged(pairs, layers=32) is None, "too short to pay"
    copies = _staged(pairs, layers=32, together=4)
    assert copies is not None
    assert copies.fills.rows.tolist() == [24] * 8
    assert copies.fills.width.tolist() == [4 * LAYER] * 8
    assert [len(range(*chunk.empty)) for chunk in copies.chunks] == [4 * 24] * 8
    assert copies.empties.device[:5].tolist() == [
        (n << 30) + block * LAYER for block, n in ((900, 0), (900, 1), (900, 2), (900, 3), (899, 0))
    ]


def test_runs_of_slots_share_a_chunk() -> None:
    pairs = [(500 - at, 100 * run + at) for run in range(4) for at in range(64)]
    copies = _staged(pairs, layers=1)
    assert copies is not None
    assert copies.fills.rows.tolist() == [64] * 4
    assert [chunk.fill for chunk in copies.chunks] == [(0, 4)]


def test_chunks_of_a_layer_are_about_as_long() -> None:
    copies = _staged([(900 - at, at) for at in range(513)], layers=1)
    assert copies is not None
    assert copies.fills.rows.tolist() == [171] * 3


def test_what_does_not_go_through_buffers() -> None:
    run = [(200 - at, 70 + at) for at in range(64)]
    assert _staged(run) is not None
    assert _staged(run[:31]) is None, "too short to pay"
    assert _staged([(block, 2 * slot) for block, slot in run]) is None, "no slots in a row"
    assert _staged(run, address=8) is None, "the kernel wants other addresses"
    assert _staged(run, pitch=LAYER + 8) is None
    assert _staged(run, capacity=LAYER) is not None
    assert _staged(run, capacity=LAYER - 1) is None

"""The choice of an operation's copies that are rows at equal distances."""

from __future__ import annotations

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.host_cache.copied_bytes import HOST, NO_LIMIT, bytes_of, pages_of, pool_of
from vllm_graft.hicache.copies import strided
from vllm_graft.hicache.copies.strided import Columns, HostShard, StridedPlan, StridedPlanner
from vllm_graft.hicache.messages.operation import CacheOperation, Direction, PoolTransfer
from vllm_graft.hicache.pages.layout import LayerPages, pages_bytes

_widths = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3)
_pools = st.lists(st.tuples(_widths, st.integers(0, 2), st.booleans()), min_size=1, max_size=2).map(
    lambda found: {n: pool_of(n, *args) for n, args in enumerate(found)}
)
_runs = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=5
)


@given(pools=_pools, data=st.data(), pinned=st.integers(1, 7), least=st.integers(2, 12))
@settings(max_examples=150, deadline=None)
def test_2d_copies_and_the_rest_are_all_bytes_once(
    pools: dict[int, list[LayerPages]], data: st.DataObject, pinned: int, least: int
) -> None:
    slot_bytes = max(map(pages_bytes, pools.values())) + 1
    transfers = []
    for group in pools:
        pairs = {(b + i, s + i) for b, s, n in data.draw(_runs) for i in range(n)}
        ordered = data.draw(st.permutations(sorted(pairs)))
        transfers.append(PoolTransfer(group, [s for _, s in ordered], [b for b, _ in ordered]))
    operation = CacheOperation([3], Direction.LOAD, transfers, 5, ["r"])
    expected, by_name = pages_of(pools, operation, slot_bytes)
    with mock.patch.object(strided, "LEAST_BYTES", least):
        planner = StridedPlanner(pools, HostShard(HOST, slot_bytes, pinned), NO_LIMIT)
        for by_layer in (False, True):
            part = planner.plan(operation, by_layer)
            if part is None:
                continue
            rest, rest_by_name = [], {}
            if part.rest is not None:
                assert (part.rest.ids, part.rest.request_ids) == ([3], ["r"])
                rest, rest_by_name = pages_of(pools, part.rest, slot_bytes)
            assert sorted(bytes_of(part.copies) + rest) == expected
            for name in by_name if by_layer else ():
                span = part.ranges.get(name, (0, 0))
                found = bytes_of(part.copies, *span) + rest_by_name.get(name, [])
                assert sorted(found) == by_name[name]
            copies = part.copies
            first = (copies.host - HOST) // slot_bytes // pinned
            last = (copies.host - HOST + (copies.rows - 1) * slot_bytes) // slot_bytes // pinned
            assert (first == last).all(), "a copy reaches into memory that is pinned apart"


def _planned(
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
    part = _planned(pairs, [[LAYER]] * 8)
    assert part is not None
    assert part.rest is not None
    assert part.copies.rows.tolist() == [32] * 8
    assert part.copies.host_pitch.tolist() == [8 * LAYER] * 8
    assert part.copies.num_bytes == 8 * strided.LEAST_BYTES
    assert sum(map(len, part.rest.transfers)) == 32


def test_the_order_of_pairs_is_of_no_account() -> None:
    pairs = _consecutive(10, 70, 40)
    for ordered in (pairs[::-1], pairs[20:] + pairs[:20], pairs[::2] + pairs[1::2]):
        part = _planned(ordered, [[LAYER]])
        assert part is not None
        assert part.rest is None
        assert part.copies.rows.tolist() == [40]


def test_slots_that_go_to_two_requests_are_two_runs() -> None:
    pairs = [
        pair for both in zip(_consecutive(10, 70, 40), _consecutive(90, 70, 40)) for pair in both
    ]
    part = _planned(pairs, [[LAYER]])
    assert part is not None
    assert part.rest is None
    assert part.copies.rows.tolist() == [40, 40]


def test_what_2d_copies_are_no_good_for() -> None:
    run = _consecutive(10, 70, 64)
    assert _planned(run, [[LAYER]] * 2) is not None
    assert _planned([(block, 200 - slot) for block, slot in run], [[LAYER]] * 2) is None
    assert _planned(run[:31], [[LAYER]] * 2) is None
    assert _planned(run, [[LAYER]] * 2, max_pitch=2 * LAYER - 1) is None
    assert _planned(run, [[LAYER]] * 2, max_pitch=2 * LAYER) is not None
    # A page of this length is long enough for a copy of its own.
    assert _planned(run, [[strided.LEAST_BYTES]] * 2) is None


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

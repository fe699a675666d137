"""Slots, reference counts and jobs: a store takes all pools or none, and nothing leaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_graft.hicache.host.controller import HybridCacheController
from vllm_graft.hicache.host.eviction import LruPolicy
from vllm_graft.hicache.host.index import HostIndex
from vllm_graft.hicache.messages.operation import CacheOperation, Direction, PoolTransfer, merge_ops
from vllm_graft.hicache.pages.groups import Group, HitPolicy
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.planning.request_state import Recency

GROUPS = [
    Group(0, 16, 1, HitPolicy.ALL_PAGES, 0, 4096, ("layers.0",)),
    Group(1, 16, 1, HitPolicy.LAST_PAGE, 0, 4096, ("layers.1",)),
]


def _key(number: int, pool: int = 0) -> PageKey:
    return PageKey(number.to_bytes(4, "big"), pool)


def _controller(slots: int, workers: int = 1) -> HybridCacheController:
    index = HostIndex(slots, LruPolicy(slots), {0: 4096, 1: 4096})
    return HybridCacheController(GROUPS, index, workers)


def _done(controller: HybridCacheController, operation: CacheOperation | None) -> None:
    assert operation is not None
    controller.report({operation.ids[0]: 1}, {})


def test_pools_are_reserved_together_or_not_at_all() -> None:
    controller = _controller(slots=3)
    assert (
        controller.store([(_key(0), 10), (_key(1), 11), (_key(0, 1), 12), (_key(1, 1), 13)]) is None
    )
    assert controller.index.num_free == 3
    assert controller.declined_stores == 1
    assert not controller.jobs
    operation = controller.store([(_key(0), 10), (_key(1), 11), (_key(1, 1), 13)])
    assert operation is not None
    assert {transfer.group: len(transfer) for transfer in operation.transfers} == {0: 2, 1: 1}


def test_pages_are_offered_once_every_rank_has_copied() -> None:
    controller = _controller(slots=2, workers=2)
    operation = controller.store([(_key(0), 10)])
    assert operation is not None
    controller.report({operation.ids[0]: 1}, {})
    assert not controller.index.has(_key(0))
    assert controller.load([(_key(0), 20)], "r") is None
    finished = controller.report({operation.ids[0]: 1}, {})
    assert [page.key for page in finished.stored] == [_key(0)]
    assert controller.index.has(_key(0))


def test_what_is_being_loaded_is_not_evicted() -> None:
    controller = _controller(slots=1)
    _done(controller, controller.store([(_key(0), 10)]))
    load = controller.load([(_key(0), 20)], "r")
    assert controller.store([(_key(1), 11)]) is None
    _done(controller, load)
    assert controller.store([(_key(1), 11)]) is not None
    assert not controller.index.has(_key(0))
    assert controller.index.evictions == 1


@pytest.mark.parametrize("direction", list(Direction))
def test_failed_pages_are_forgotten(direction: Direction) -> None:
    controller = _controller(slots=1)
    operation = controller.store([(_key(0), 10)])
    if direction is Direction.LOAD:
        _done(controller, operation)
        operation = controller.load([(_key(0), 20)], "r")
    assert operation is not None
    number = operation.ids[0]
    finished = controller.report({number: 1}, {number: 1})
    assert not controller.index.has(_key(0))
    assert controller.index.num_free == 1
    assert finished.failed_requests == (["r"] if direction is Direction.LOAD else [])
    assert finished.stored == []


def test_a_reset_outlives_what_was_in_flight() -> None:
    controller = _controller(slots=2)
    _done(controller, controller.store([(_key(0), 10)]))
    load = controller.load([(_key(0), 20)], "r")
    store = controller.store([(_key(1), 11)])
    controller.reset()
    assert controller.index.num_free == 0, "copies still use the slots"
    _done(controller, load)
    assert store is not None
    assert controller.report({store.ids[0]: 1}, {}).stored == []
    assert controller.index.num_free == 2
    assert not controller.index.has(_key(1))


def test_fences_name_the_stores_that_read_a_block() -> None:
    controller = _controller(slots=4)
    first = controller.store([(_key(0), 10), (_key(1), 11)])
    second = controller.store([(_key(2), 12)])
    assert first is not None
    assert second is not None
    assert controller.jobs_reading([11, 99]) == set(first.ids)
    assert controller.jobs_reading([12, 10]) == {*first.ids, *second.ids}
    _done(controller, first)
    assert controller.jobs_reading([10, 11]) == set()


def test_a_cancelled_store_leaves_nothing() -> None:
    controller = _controller(slots=1)
    operation = controller.store([(_key(0), 10)])
    assert operation is not None
    controller.cancel(operation)
    assert controller.index.num_free == 1
    assert controller.jobs_reading([10]) == set()
    assert controller.store([(_key(0), 10)]) is not None


@pytest.mark.parametrize("late", [False, True])
def test_the_tail_of_a_prefix_leaves_before_its_head(late: bool) -> None:
    """vLLM's cache has this order too; ours keeps it if the last store ends after the request."""
    controller = _controller(slots=6)
    index, recency = controller.index, Recency(GROUPS[:1], controller.index)
    keys = [_key(number) for number in range(4)]
    _done(controller, controller.store([(key, 10) for key in keys[:2]]))
    last = controller.store([(key, 20) for key in keys[2:]])
    if not late:
        _done(controller, last)
    # This page is newer, until the end of the request refreshes the others.
    _done(controller, controller.store([(_key(9), 30)]))
    recency.ended({0: keys}, 4 * 16)
    if late:
        _done(controller, last)
        recency.poll()
    assert index.policy.evict(5, lambda key: False) == [_key(9), *reversed(keys)]


def test_an_ended_request_refreshes_what_it_computed_and_no_more() -> None:
    controller = _controller(slots=4)
    recency = Recency(GROUPS[:1], controller.index)
    keys = [_key(number) for number in range(3)]
    for key in keys:
        _done(controller, controller.store([(key, 10)]))
    recency.ended({0: keys}, 16 + 15)
    assert controller.index.policy.evict(3, lambda key: False) == [keys[1], keys[2], keys[0]]
    recency.ended({0: keys}, -1)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("slrfx")), max_size=60))
def test_slots_are_never_lost_nor_given_twice(steps: list[tuple[int, str]]) -> None:
    controller = _controller(slots=4)
    index = controller.index
    for number, step in steps:
        if step == "s":
            controller.store([(_key(number), number), (_key(number, 1), 100 + number)])
        elif step == "l":
            controller.load([(_key(number), number)], str(number))
        elif step == "x":
            controller.reset()
        elif controller.jobs:
            job = next(iter(controller.jobs))
            controller.report({job: 1}, {job: 1} if step == "f" else {})
        used = {page.slot for page in index._pages.values()}
        used |= {page.slot for job in controller.jobs.values() for page in job.pages}
        assert used.isdisjoint(index._free)
        assert len(used) + len(set(index._free)) == 4
        assert len(set(index._free)) == index.num_free
    for job in list(controller.jobs):
        controller.report({job: 1}, {})
    controller.reset()
    assert index.num_free == 4


def test_operations_of_a_step_are_merged_most_urgent_first() -> None:
    def operation(job: int, priority: int, *pools: int) -> CacheOperation:
        transfers = [PoolTransfer(pool, [job], [10 * job]) for pool in pools]
        return CacheOperation([job], Direction.STORE, transfers, priority)

    merged = merge_ops([operation(1, 5, 0, 1), operation(2, 0, 1)])
    assert merged is not None
    assert merged.ids == [2, 1]
    assert [(t.group, t.host_indices, t.device_indices) for t in merged.transfers] == [
        (1, [2, 1], [20, 10]),
        (0, [1], [10]),
    ]
    assert merge_ops([]) is None
    with pytest.raises(ValueError, match="both directions"):
        merge_ops([operation(1, 0, 0), CacheOperation([3], Direction.LOAD, [])])
    with pytest.raises(ValueError, match="1 host slots for 2"):
        PoolTransfer(0, [1], [2, 3])

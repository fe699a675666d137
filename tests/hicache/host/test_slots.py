"""Slots, reference counts, jobs and eviction: nothing leaks, and the least worth leaves first."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.host_cache.dying_engines import Machine
from vllm_graft.hicache.host.controller import HybridCacheController
from vllm_graft.hicache.host.eviction import ArcPolicy, EvictionPolicy, Key, LruPolicy
from vllm_graft.hicache.host.free_slots import FreeSlots, facing
from vllm_graft.hicache.host.index import HostIndex
from vllm_graft.hicache.messages.operation import CacheOperation, Direction, PoolTransfer, merge_ops
from vllm_graft.hicache.pages.groups import Group, HitPolicy
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.planning.request_state import Recency
from vllm_graft.hooks.manager import Manager
from vllm_graft.testing import EvictionPolicyContract


def _ranges(slots: list[int]) -> int:
    return 1 + sum(after != before + 1 for before, after in pairwise(slots))


def _free(slots: FreeSlots) -> set[int]:
    return {slot for first, end in slots._ends.items() for slot in range(first, end)}


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
        assert _free(free) == set(range(count)) - used
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


def _seeded_keys(count: int, seed: int) -> list[PageKey]:
    return [PageKey(bytes([seed, number]), 0) for number in range(count)]


@pytest.mark.parametrize("step", [1, -1])
def test_slots_go_the_way_that_blocks_go(step: int) -> None:
    policy: EvictionPolicy = LruPolicy(24)
    index = HostIndex(24, policy, {0: 1})
    for seed in range(4):
        blocks = list(range(40, 48))[::step]
        pages = index.reserve(_seeded_keys(8, seed), blocks=blocks)
        assert pages is not None
        assert [page.key for page in pages] == _seeded_keys(8, seed)
        slots = [page.slot for page in pages]
        # The fourth time they take the slots of evicted pages.
        assert _ranges(slots[::step]) == 1
        index.commit(pages)
    assert index.evictions == 8


GROUPS = [
    Group(0, 16, 1, HitPolicy.ALL_PAGES, 0, 4096, ("layers.0",)),
    Group(1, 16, 1, HitPolicy.LAST_PAGE, 0, 4096, ("layers.1",)),
]


def _key(number: int, pool: int = 0) -> PageKey:
    return PageKey(number.to_bytes(4, "big"), pool)


def _controller(slots: int, workers: int = 1, shared: bool = False) -> HybridCacheController:
    index = HostIndex(slots, LruPolicy(slots), {0: 4096, 1: 4096})
    if shared:
        index = Machine(slots).start().index
    return HybridCacheController(GROUPS, index, workers)


both_pools = pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])


def _done(controller: HybridCacheController, operation: CacheOperation | None) -> None:
    assert operation is not None
    controller.report({operation.ids[0]: 1}, {})


@both_pools
def test_pools_are_reserved_together_or_not_at_all(shared: bool) -> None:
    controller = _controller(slots=3, shared=shared)
    four = [(_key(0), 10), (_key(1), 11), (_key(0, 1), 12), (_key(1, 1), 13)]
    assert controller.store(four) is None
    assert controller.index.num_free == 3
    assert controller.declined_stores == 1
    assert not controller.jobs
    operation = controller.store([*four[:2], four[3]])
    assert operation is not None
    assert {transfer.group: len(transfer) for transfer in operation.transfers} == {0: 2, 1: 1}


@both_pools
def test_pages_are_offered_once_every_rank_has_copied(shared: bool) -> None:
    controller = _controller(slots=2, workers=2, shared=shared)
    operation = controller.store([(_key(0), 10)])
    assert operation is not None
    controller.report({operation.ids[0]: 1}, {})
    assert not controller.index.has(_key(0))
    assert controller.load([(_key(0), 20)], "r") is None
    finished = controller.report({operation.ids[0]: 1}, {})
    assert [page.key for page in finished.stored] == [_key(0)]
    assert controller.index.has(_key(0))


@both_pools
def test_what_is_being_loaded_is_not_evicted(shared: bool) -> None:
    controller = _controller(slots=1, shared=shared)
    _done(controller, controller.store([(_key(0), 10)]))
    load = controller.load([(_key(0), 20)], "r")
    assert controller.store([(_key(1), 11)]) is None
    _done(controller, load)
    assert controller.store([(_key(1), 11)]) is not None
    assert not controller.index.has(_key(0))
    assert controller.index.counts()["evictions"] == 1


@both_pools
@pytest.mark.parametrize("direction", list(Direction))
def test_failed_pages_are_forgotten(direction: Direction, shared: bool) -> None:
    controller = _controller(slots=1, shared=shared)
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


@both_pools
def test_a_page_that_does_not_fit_is_forgotten_alone(shared: bool) -> None:
    """One of two ranks could not bring it into the host's form; the other reports it as done."""
    controller = _controller(slots=3, workers=2, shared=shared)
    operation = controller.store([(_key(number), 10 + number) for number in range(3)])
    assert operation is not None
    (number,), (transfer,) = operation.ids, operation.transfers
    reports = [
        controller.report({number: 1}, {}, unfit) for unfit in ({transfer.host_indices[1]}, set())
    ]
    assert [report.unfit for report in reports] == [1, 0]
    assert [controller.index.has(_key(each)) for each in range(3)] == [True, False, True]
    assert controller.index.num_free == 1
    assert [page.indexed for page in reports[1].stored] == [True, False, True]
    # A slot that is loaded belongs to no store.
    load = controller.load([(_key(0), 20)], "r")
    assert load is not None
    controller.report({load.ids[0]: 2}, {}, set(load.transfers[0].host_indices))
    assert controller.index.has(_key(0))


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


@both_pools
def test_a_cancelled_store_leaves_nothing(shared: bool) -> None:
    controller = _controller(slots=1, shared=shared)
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
        free = _free(index._free)
        assert used.isdisjoint(free)
        assert len(used) + len(free) == 4
        assert len(free) == index.num_free
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


POLICIES = {"lru": LruPolicy, "arc": ArcPolicy}


def nobody(key: Key) -> bool:
    return False


class TestOurs(EvictionPolicyContract):
    @pytest.fixture(params=list(POLICIES))
    def policy(self, request: pytest.FixtureRequest) -> EvictionPolicy:
        return POLICIES[request.param](capacity=8)


def test_all_are_offered_by_name() -> None:
    offers = Manager().offers("graft_eviction_policies")
    assert {offer.entry.name: offer.entry.resolve() for offer in offers} == POLICIES


def test_a_pool_holds_a_page_or_more() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        LruPolicy(0)


class Reference:
    """A reference for `lru`: a list of keys, the least recently used first."""

    def __init__(self) -> None:
        self.keys: list[Key] = []

    def insert(self, key: Key, cost: float, size: int) -> None:
        self.remove(key)
        self.keys.append(key)

    def touch(self, key: Key) -> None:
        if key in self.keys:
            self.insert(key, 0, 0)

    refresh = touch

    def remove(self, key: Key) -> None:
        if key in self.keys:
            self.keys.remove(key)

    def evict(self, n: int, is_protected: Callable[[Key], bool]) -> list[Key] | None:
        victims = [key for key in self.keys if not is_protected(key)][:n]
        if len(victims) < n:
            return None
        for key in victims:
            self.keys.remove(key)
        return victims


names = st.integers(0, 11)
steps = st.one_of(
    st.tuples(st.just("insert"), names, st.integers(0, 5), st.sampled_from([1, 3, 1000])),
    st.tuples(st.sampled_from(["touch", "refresh", "remove"]), names),
    st.tuples(st.just("evict"), st.integers(0, 5), st.frozensets(names, max_size=4)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=60))
def test_lru_has_the_same_victims_as_the_reference(sequence: list[tuple[object, ...]]) -> None:
    policy, reference = LruPolicy(8), Reference()
    for action, *arguments in sequence:
        if action == "evict":
            n, protected = arguments
            assert isinstance(protected, frozenset)
            found = policy.evict(n, protected.__contains__)  # type: ignore[arg-type]
            assert found == reference.evict(n, protected.__contains__)  # type: ignore[arg-type]
        else:
            getattr(policy, str(action))(*arguments)
            getattr(reference, str(action))(*arguments)
        assert len(policy) == len(reference.keys)


def hit_rate(policy: EvictionPolicy, trace: list[int]) -> float:
    hits = 0
    for key in trace:
        if key in policy:
            hits += 1
            policy.touch(key)
        else:
            if len(policy) == policy.capacity:
                assert policy.evict(1, nobody) is not None
            policy.insert(key, 1.0, 1000)
    return hits / len(trace)


def scans_and_a_hot_set(seed: int) -> list[int]:
    """Draw accesses: half go to 40 pages, the others to pages that never come again."""
    rng = random.Random(seed)
    return [rng.randrange(40) if rng.random() < 0.5 else 1000 + number for number in range(8000)]


def test_arc_resists_a_scan() -> None:
    trace = scans_and_a_hot_set(1)
    rates = {name: hit_rate(POLICIES[name](60), trace) for name in POLICIES}
    assert rates["arc"] > rates["lru"] + 0.05


def test_ageing_lets_yesterdays_favourites_go() -> None:
    """The hot set moves: pages that were used a thousand times before must not stay for ever."""
    trace = [number % 50 for number in range(20_000)] + [
        100 + number % 50 for number in range(20_000)
    ]
    for name in POLICIES:
        policy = POLICIES[name](60)
        hit_rate(policy, trace)
        assert all(100 + key in policy for key in range(50)), name


def test_arc_learns_which_part_was_too_small() -> None:
    policy = ArcPolicy(4)
    for key in range(4):
        policy.insert(key, 1, 1)
    assert policy.evict(2, nobody) == [0, 1]
    assert policy.target == 0
    policy.insert(0, 1, 1)
    assert policy.target == 1
    # The page came back, so it counts as used before, and leaves after pages used once.
    assert policy.evict(2, nobody) == [2, 3]
    policy.insert("new", 1, 1)
    assert policy.evict(1, nobody) == ["new"]
    policy.clear()
    assert policy.target == 0


def test_a_refreshed_tail_leaves_before_its_head() -> None:
    """Pages are stored head first, and refreshed tail first when the request ends."""
    for name, kind in POLICIES.items():
        policy = kind(8)
        for block in range(5):
            policy.insert(block, 1.0, 1)
        for block in reversed(range(5)):
            policy.refresh(block)
        assert policy.evict(5, nobody) == [4, 3, 2, 1, 0], name

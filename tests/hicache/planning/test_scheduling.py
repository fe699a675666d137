"""What the scheduler's side does when weights change, and how long it takes for long prompts."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.host_cache.dying_engines import Machine
from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.hicache.host.eviction import LruPolicy
from vllm_graft.hicache.host.index import HostIndex
from vllm_graft.hicache.messages.operation import CacheOperation
from vllm_graft.hicache.messages.step_metadata import HiCacheMetadata, HiCacheReport
from vllm_graft.hicache.pages.engine_core import Change
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.groups import Group, HitPolicy
from vllm_graft.hicache.pages.page_key import PageKey, salted
from vllm_graft.hicache.pages.pool_shape import PoolShape
from vllm_graft.hicache.planning.request_state import RequestState
from vllm_graft.hicache.planning.scheduler import HiCacheScheduler
from vllm_graft.hicache.planning.storage_reads import ASKED, StorageReads

GROUP = Group(0, 16, 1, HitPolicy.ALL_PAGES, 0, 4096, ("layers.0",))
BLOCKS = 4
TOKENS = 16 * BLOCKS


NOTHING: dict[str, Any] = {
    "kv_connector_block_state": None,
    "num_scheduled_tokens": {},
    "total_num_scheduled_tokens": 0,
    "new_block_ids_to_zero": None,
    "scheduled_new_reqs": [],
    "scheduled_cached_reqs": SimpleNamespace(new_block_ids=[]),
    "kv_cache_block_copies": None,
}
"""The output of a step of vLLM's scheduler in which nothing runs."""


class Engine:
    """The scheduler's side, with one request at a time of four full blocks."""

    def __init__(
        self,
        load: str = "async",
        page_bytes: int = 4096,
        slots: int = 32,
        index: HostIndex | None = None,
    ) -> None:
        shape, group = PoolShape(slots, page_bytes, 1), replace(GROUP, page_bytes=page_bytes)
        geometry = Geometry((group,), shape, None, 1, 1, False, frozenset())
        if index is None:
            index = HostIndex(slots, LruPolicy(slots), {0: page_bytes})
        config = HiCacheConfig.parse({"host_bytes": "128KiB", "load": load})
        self.scheduler = HiCacheScheduler(config, geometry, index, speculative=False)
        self.requests = 0

    def request(self, lora: bool = False) -> Any:
        self.requests += 1
        return SimpleNamespace(
            request_id=str(self.requests),
            block_hashes=[bytes([number]) * 32 for number in range(BLOCKS)],
            lora_request=SimpleNamespace(lora_name="a") if lora else None,
            skip_reading_prefix_cache=False,
            num_tokens=TOKENS + 1,
            num_computed_tokens=0,
            status=None,
        )

    def begin(self, request: Any) -> int | None:
        """Look a request up, and return how many tokens can be loaded."""
        self.scheduler.arrived(request)
        return self.scheduler.lookup(request, 0)[0]

    def step(self, request: Any) -> list[CacheOperation]:
        """Compute the whole request; return the stores of the step."""
        tables = SimpleNamespace(
            get_block_ids=lambda _: [list(range(1, BLOCKS + 1))], boundary_state_offloads={}
        )
        output: Any = SimpleNamespace(
            **NOTHING
            | {
                "kv_connector_block_state": tables,
                "num_scheduled_tokens": {request.request_id: TOKENS},
                "total_num_scheduled_tokens": TOKENS,
            }
        )
        metadata: HiCacheMetadata = self.scheduler.build(output)
        return [*metadata.early_stores, *metadata.stores]

    def ended(self, stores: list[CacheOperation]) -> None:
        done = HiCacheReport(done=Counter(number for store in stores for number in store.ids))
        self.scheduler.report(
            SimpleNamespace(invalid_block_ids=None, kv_connector_worker_meta=done)  # type: ignore[arg-type]
        )

    def fill(self, lora: bool = False) -> None:
        request = self.request(lora)
        self.begin(request)
        self.ended(self.step(request))
        self.finish(request)

    def finish(self, request: Any) -> None:
        request.num_computed_tokens = TOKENS
        self.scheduler.finished(request, [list(range(1, BLOCKS + 1))])

    def join(self, tokens: int | None = None) -> HiCacheMetadata:
        """Let a request begin, one of `tokens` without a hit; return the loads of the next step."""
        request = self.request()
        found = self.begin(request) or 0
        if tokens is not None:
            request.num_tokens, found = tokens, 0
        blocks: Any = SimpleNamespace(get_block_ids=lambda: [list(range(1, BLOCKS + 1))])
        self.scheduler.allocated(request, blocks, found)
        return self.scheduler._loads._next

    def offered(self, lora: bool = False) -> int | None:
        request = self.request(lora)
        found = self.begin(request)
        self.finish(request)
        # The probe's own store is not wanted.
        for operation in self.scheduler._early_stores:
            self.scheduler.controller.cancel(operation)
        self.scheduler._early_stores = []
        return found


def _reset(scheduler: HiCacheScheduler) -> None:
    assert scheduler.reset()


def _weights(scheduler: HiCacheScheduler) -> None:
    scheduler.changed(Change.WEIGHTS)


CHANGES = [_reset, _weights]
ChangeIt = Callable[[HiCacheScheduler], None]


@pytest.mark.parametrize("change", CHANGES)
def test_pages_of_before_are_not_offered(change: ChangeIt) -> None:
    engine = Engine()
    engine.fill()
    assert engine.offered() == TOKENS
    change(engine.scheduler)
    assert len(engine.scheduler.index) == 0
    assert engine.offered() == 0
    engine.fill()
    assert engine.offered() == TOKENS


@pytest.mark.parametrize("change", CHANGES)
def test_a_running_request_is_not_stored_any_more(change: ChangeIt) -> None:
    """Neither in its next step, nor when it ends: its first blocks were computed before."""
    engine = Engine()
    request = engine.request()
    engine.begin(request)
    change(engine.scheduler)
    assert engine.step(request) == []
    engine.finish(request)
    assert not engine.scheduler.busy


@pytest.mark.parametrize("change", CHANGES)
def test_a_store_in_flight_ends_without_a_page(change: ChangeIt) -> None:
    engine = Engine()
    request = engine.request()
    engine.begin(request)
    stores = engine.step(request)
    assert len(stores) == 1
    change(engine.scheduler)
    engine.ended(stores)
    assert len(engine.scheduler.index) == 0
    assert engine.scheduler.index.num_free == 32


@pytest.mark.parametrize("change", CHANGES)
def test_a_preempted_request_computes_anew_and_is_stored(change: ChangeIt) -> None:
    """A reset with ``reset_running_requests`` preempts; vLLM then looks the request up again."""
    engine = Engine()
    request = engine.request()
    engine.begin(request)
    engine.ended(engine.step(request))
    change(engine.scheduler)
    assert engine.scheduler.lookup(request, 0) == (0, False)
    engine.ended(engine.step(request))
    assert engine.offered() == TOKENS


@pytest.mark.parametrize("change", CHANGES)
def test_no_other_engine_finds_pages_of_after(change: ChangeIt) -> None:
    """Keys are vLLM's hashes as long as the namespace is true, and then differ every time."""
    engine = Engine()
    hashes = [PageKey(one, 0) for one in engine.request().block_hashes]
    seen: list[set[PageKey]] = []
    for _ in range(3):
        engine.fill()
        seen.append(set(engine.scheduler.index._pages))
        change(engine.scheduler)
    assert seen[0] == set(hashes)
    assert all(len(keys) == BLOCKS for keys in seen)
    assert len(set.union(*seen)) == 3 * BLOCKS


def test_an_adapter_that_is_loaded_again_costs_adapters_alone() -> None:
    engine = Engine()
    engine.fill(lora=True)
    assert engine.offered(lora=True) == TOKENS
    engine.scheduler.changed(Change.ADAPTER)
    assert engine.offered(lora=True) == 0
    running = engine.request(lora=True)
    engine.begin(running)
    engine.scheduler.changed(Change.ADAPTER)
    assert engine.step(running) == []
    plain = Engine()
    plain.fill()
    plain.scheduler.changed(Change.ADAPTER)
    assert plain.offered() == TOKENS


def test_a_salt_changes_a_hash_and_none_does_not() -> None:
    assert salted(b"x" * 64, b"") == b"x" * 64
    assert salted(b"x", b"s") != salted(b"x", b"t")
    assert len(salted(b"x" * 64, b"s" * 32)) == 32


PAGE = 64 << 20
"""Bytes of a page of which four take 13 ms to load, by the rates that a cost model begins with."""


def test_a_load_within_a_step_that_was_built_is_not_waited_for() -> None:
    """Its step ends before the next one's loads begin, whatever the ranks have reported."""
    engine = Engine("layerwise", PAGE)
    engine.fill()
    scheduler = engine.scheduler
    assert len(engine.join().sync_loads) == 1
    assert scheduler._loads.queued_bytes == BLOCKS * PAGE
    scheduler._loads.take()
    assert scheduler._loads.queued_bytes == 0
    assert len(scheduler.controller.jobs) == 1


def test_a_load_outside_of_steps_is_waited_for_until_it_is_reported() -> None:
    engine = Engine("async", PAGE)
    engine.fill()
    [load] = engine.join().async_loads
    engine.scheduler._loads.take()
    assert engine.scheduler._loads.queued_bytes == BLOCKS * PAGE
    engine.ended([load])
    assert engine.scheduler._loads.queued_bytes == 0


@pytest.mark.parametrize("tokens", [None, 16, 16_384])
def test_a_load_is_free_beside_a_prompt_that_takes_longer(tokens: int | None) -> None:
    engine = Engine("auto", PAGE)
    engine.fill()
    engine.scheduler._running = 32
    if tokens:
        engine.join(tokens)
    loads = engine.join()
    assert bool(loads.sync_loads) == (tokens == 16_384)
    assert bool(loads.async_loads) == (tokens != 16_384)


@pytest.fixture
def sharing() -> Iterator[tuple[Engine, Engine, HostIndex]]:
    """Two engines and another index of a pool with room for one prompt, which the first has."""
    with Machine(BLOCKS) as machine:
        indices = [machine.start().index for _ in range(3)]
        one, other = (Engine(slots=BLOCKS, index=index) for index in indices[:2])
        one.fill()
        yield one, other, indices[2]


FRESH = [PageKey(bytes([100 + number]) * 32, 0) for number in range(BLOCKS)]


def test_an_offer_of_shared_pages_stays_until_its_step_is_built(
    sharing: tuple[Engine, Engine, HostIndex],
) -> None:
    _, other, third = sharing
    request, blocks = other.request(), list(range(1, BLOCKS + 1))
    assert other.begin(request) == TOKENS
    assert third.reserve(FRESH) is None
    tables: Any = SimpleNamespace(get_block_ids=lambda: [blocks])
    other.scheduler.allocated(request, tables, TOKENS)
    loads = other.scheduler._loads._next.async_loads
    other.step(request)
    # The load holds its pages until it has ended.
    assert third.reserve(FRESH) is None
    other.ended(loads)
    other.begin(other.request())
    other.step(request)
    # An offer that was not taken ends with its step.
    assert third.reserve(FRESH) is not None


def test_nobody_waits_for_what_a_stopped_engine_is_filling(
    sharing: tuple[Engine, Engine, HostIndex],
) -> None:
    """To refresh the pages of ended requests; each would be kept until it goes on."""
    one, other, third = sharing
    assert one.scheduler.reset()
    head = PageKey(bytes(32), 0)
    assert third.reserve([head]) is not None
    for _ in range(3):
        other.fill()
        assert not other.scheduler._recency._waiting
    assert (page := other.scheduler.index.get(head)) is not None
    assert page.of_other


@pytest.mark.parametrize("brings", [True, False])
def test_storage_is_asked_for_what_shared_memory_does_not_have_now(
    sharing: tuple[Engine, Engine, HostIndex], brings: bool
) -> None:
    """Others may have brought or evicted the pages since this engine has looked."""
    _, other, third = sharing
    prompt = [PageKey(bytes([number]) * 32, 0) for number in range(BLOCKS)]
    for keys in (FRESH, prompt) if brings else (FRESH,):
        assert other.offered() == (TOKENS if keys is FRESH else 0)
        other.scheduler.build(SimpleNamespace(**NOTHING))  # type: ignore[arg-type]
        third.commit(third.reserve(keys) or ())
    there = list[bool]()
    reads: Any = SimpleNamespace(
        arrived=lambda state, limit: there.extend(map(other.scheduler.index.has, state.keys[0]))
    )
    other.scheduler.storage_reads = reads
    other.scheduler.arrived(other.request())
    assert there == [brings] * BLOCKS


def test_who_shares_is_told_of_resets_and_not_of_weights(
    sharing: tuple[Engine, Engine, HostIndex],
) -> None:
    one, other, _ = sharing
    one.scheduler.changed(Change.WEIGHTS)
    assert one.begin(one.request()) == 0
    assert other.offered() == TOKENS
    other.scheduler.build(SimpleNamespace(**NOTHING))  # type: ignore[arg-type]
    assert one.scheduler.reset()
    assert other.offered() == 0


def test_adapters_share_no_pages(sharing: tuple[Engine, Engine, HostIndex]) -> None:
    one, other, _ = sharing
    one.fill(lora=True)
    assert one.offered(lora=True) == TOKENS
    assert other.offered(lora=True) == 0


SECONDS = 0.005


class Tier:
    """Storage that has the first `there` pages of a prompt."""

    bytes_in_flight = 0

    def __init__(self, there: int) -> None:
        self.there = {number.to_bytes(32, "big") for number in range(there)}
        self.asked: list[int] = []

    def is_incoming(self, key: PageKey) -> bool:
        return False

    def contains(self, keys: Sequence[PageKey]) -> dict[PageKey, bool]:
        self.asked.append(len(keys))
        return {key: key.hash in self.there for key in keys}

    def prefetch(self, request_id: str, keys: list[PageKey], tokens: int) -> Any:
        return SimpleNamespace(keys=keys, tokens=tokens)


def arrive(blocks: int, there: int = 0) -> tuple[Tier, StorageReads, float]:
    """Let a request arrive; return the CPU seconds of this thread besides."""
    geometry = Geometry((GROUP,), PoolShape(8, 4096, 1), None, 1, 1, False, frozenset())
    tier: Any = Tier(there)
    cost: Any = SimpleNamespace(worth_reading=lambda *_: True)
    index = HostIndex(8, LruPolicy(8), {0: 4096})
    reads = StorageReads(tier, geometry, index, cost, SimpleNamespace())  # type: ignore[arg-type]
    hashes = [number.to_bytes(32, "big") for number in range(blocks)]
    request: Any = SimpleNamespace(request_id="long", block_hashes=hashes)
    began = time.thread_time()
    reads.arrived(RequestState(request, (GROUP,)), 16 * blocks)
    return tier, reads, time.thread_time() - began


@pytest.mark.parametrize("blocks", [100, 65_536])
def test_a_prompt_that_nobody_has_is_not_looked_through(blocks: int) -> None:
    tier, reads, _ = arrive(blocks)
    assert tier.asked == [min(blocks, ASKED)]
    assert not reads._running
    assert min(arrive(blocks)[2] for _ in range(5)) < SECONDS


@pytest.mark.parametrize("there", [1, ASKED, ASKED + 1, 3 * ASKED])
def test_pages_are_found_as_far_as_they_go(there: int) -> None:
    tier, reads, _ = arrive(4 * ASKED, there)
    assert tier.asked == [ASKED] * (there // ASKED + 1)
    [(operation, _, size)] = reads._running.values()
    found: Any = operation
    assert [key.hash for key in found.keys] == sorted(tier.there)
    assert (found.tokens, size) == (16 * there, 4096 * there)


def test_keys_are_those_of_full_blocks() -> None:
    """In slices as well, and of a group whose blocks have two hashes."""
    group = Group(3, 32, 2, HitPolicy.ALL_PAGES, 0, 4096, ("layers.0",))
    request: Any = SimpleNamespace(block_hashes=[bytes([number]) for number in range(5)])
    keys = RequestState(request, (group,)).keys[3]
    assert list(keys) == [PageKey(b"\x01", 3), PageKey(b"\x03", 3)] == keys[:9]
    assert keys[-1] == keys[1]
    with pytest.raises(IndexError):
        keys[2]
    request.block_hashes.append(b"\x05")
    assert keys[2] == PageKey(b"\x05", 3)
    assert keys[2] is keys[2], "none is made twice"
    del request.block_hashes[3:]
    request.block_hashes += [b"\x06", b"\x07", b"\x08"]
    assert list(keys) == [PageKey(hash_, 3) for hash_ in (b"\x01", b"\x06", b"\x08")]


def test_a_long_history_is_loaded_and_ended_quickly() -> None:
    """What vLLM asks in every step as well, as it may be long until a waiting request fits."""
    blocks, long = 4096, Engine(slots=4096)
    scheduler = long.scheduler
    request = long.request()
    request.block_hashes = [number.to_bytes(32, "big") for number in range(blocks)]
    request.num_tokens = 16 * blocks + 1
    keys = scheduler.state_of(request).keys[0]
    pages = scheduler.index.reserve(keys[:])
    assert pages is not None
    scheduler.index.commit(pages)
    tables: Any = SimpleNamespace(get_block_ids=lambda: [list(range(1, blocks + 1))])

    def seconds(call: Callable[[], object]) -> float:
        began = time.thread_time()
        call()
        return time.thread_time() - began

    assert min(seconds(lambda: scheduler.lookup(request, 0)) for _ in range(5)) < SECONDS
    assert scheduler.lookup(request, 0)[0] == 16 * blocks
    took = seconds(lambda: scheduler.allocated(request, tables, 16 * blocks))
    # One call alone, on a busy machine: what grew with the square would take seconds.
    assert took < 20 * SECONDS
    scheduler.controller.report(dict.fromkeys(scheduler.controller.jobs, 1), {})
    request.num_computed_tokens = 16 * blocks
    assert seconds(lambda: scheduler.finished(request, tables.get_block_ids())) < 20 * SECONDS

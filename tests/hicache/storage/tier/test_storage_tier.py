"""Storage below the host pool: pages of several shards, resets, and writes that cannot be kept."""

import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_cache.third_stores import raising
from vllm_graft.hicache.config.cache_config import PrefetchConfig
from vllm_graft.hicache.host import region
from vllm_graft.hicache.host.eviction import LruPolicy
from vllm_graft.hicache.host.index import HostIndex, Page
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.host.shared_index import SharedIndex
from vllm_graft.hicache.messages.cache_stats import HiCacheStats
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.groups import Group, HitPolicy
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.pages.pool_shape import PAGE, PoolShape, Sharing
from vllm_graft.hicache.planning.storage_reads import StorageReads
from vllm_graft.hicache.storage.backend import ReadStatus
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.hicache.storage.tier import io_threads
from vllm_graft.hicache.storage.tier import storage_tier as tier_module
from vllm_graft.hicache.storage.tier.storage_tier import StorageTier

SHARDS, SLOTS, SIZE = 2, 16, 100
GROUP = Group(0, 16, 1, HitPolicy.ALL_PAGES, 0, SIZE, ("layers.0",))


class _Rig:
    def __init__(self, folder: Path, shared: bool = False) -> None:
        shape = PoolShape(SLOTS, PAGE, SHARDS)
        self.geometry = Geometry((GROUP,), shape, None, SHARDS, 1, False, frozenset())
        if shared:
            name, sharing = region.PREFIX + secrets.token_hex(16), Sharing(b"engine".ljust(16), 1)
            self.pool = HostPool(shape, name, sharing=sharing)
            self.index = SharedIndex(self.pool, b"n" * 16, {0: SIZE})
        else:
            self.pool = HostPool(shape)
            self.index: HostIndex = HostIndex(SLOTS, LruPolicy(SLOTS), {0: SIZE})
        options = {"path": str(folder), "max_bytes": "16MiB"}
        self.backend = SegmentsBackend(b"n" * 16, options)
        self.tier = StorageTier(
            self.backend,
            self.pool,
            self.index,
            self.geometry,
            PrefetchConfig(policy="wait_complete"),
        )

    def keep(self, number: int) -> Page:
        (page,) = self.index.reserve([_key(number)]) or []
        for shard in range(SHARDS):
            self.pool.page(shard, page.slot, SIZE)[:] = _content(number, shard)
        self.index.commit([page])
        return page

    def store(self, *numbers: int, forget: bool = False) -> None:
        self.tier.store([self.keep(number) for number in numbers])
        self.settle()
        if forget:
            self.forget()

    def forget(self) -> None:
        self.index.clear()
        assert self.index.empty()

    def hang(self, patch: pytest.MonkeyPatch, name: str) -> tuple[threading.Event, threading.Event]:
        """Let a call of the store set the first event, and wait for the second."""
        begun, gate, stock = threading.Event(), threading.Event(), getattr(self.backend, name)

        def hanging(*arguments: Any) -> Any:
            begun.set()
            gate.wait(20)
            return stock(*arguments)

        patch.setattr(self.backend, name, hanging)
        return begun, gate

    def check(self, number: int) -> Page:
        page = self.index.get(_key(number))
        assert page is not None
        for shard in range(SHARDS):
            assert bytes(self.pool.page(shard, page.slot, SIZE)) == _content(number, shard)
        return page

    def settle(self) -> None:
        until = time.monotonic() + 20
        while self.tier.write_queue and time.monotonic() < until:
            time.sleep(0.005)
        self.tier.poll()

    def fetch(self, *numbers: int) -> Any:
        operation = self.tier.prefetch("r", [_key(number) for number in numbers], 1000)
        until = time.monotonic() + 20
        # It ends with the first page that is missing, while others may be read still.
        while (self.tier.bytes_in_flight or not operation.ended) and time.monotonic() < until:
            self.tier.poll()
        return operation


def _key(number: int) -> PageKey:
    return PageKey(number.to_bytes(4, "big"), 0)


def _content(number: int, shard: int) -> bytes:
    return bytes([number, shard]) * (SIZE // 2)


@pytest.fixture(params=["private", "shared"])
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[_Rig]:
    made = _Rig(tmp_path, shared=request.param == "shared")
    yield made
    made.tier.close()


def test_shards_come_back_together(rig: _Rig) -> None:
    rig.store(*range(3))
    assert rig.tier.written == 3
    rig.forget()
    assert rig.tier.contains([_key(0), _key(9)]) == {_key(0): True, _key(9): False}
    operation = rig.fetch(0, 1, 2)
    assert operation.loaded == 3
    for number in range(3):
        page = rig.check(number)
        assert page.ready
        assert page.from_storage


def test_a_page_without_one_of_its_shards_is_not_offered(rig: _Rig) -> None:
    rig.store(0, 1, forget=True)
    rig.backend.remove(rig.tier._part(_key(1), 1))
    assert rig.tier.contains([_key(1)]) == {_key(1): False}
    rig.fetch(0, 1)
    assert rig.index.has(_key(0))
    assert not rig.index.has(_key(1))
    assert rig.index.num_free == SLOTS - 1


def test_a_page_that_is_read_for_two_requests_is_read_once_and_offered_whole(
    rig: _Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.store(0, forget=True)
    gate, reads, stock = threading.Event(), [], rig.backend.read

    def read(key: PageKey, buffer: memoryview) -> ReadStatus:
        reads.append(key.pool)
        if key.pool == 1:
            assert gate.wait(20)
        return stock(key, buffer)

    monkeypatch.setattr(rig.backend, "read", read)
    both = [rig.tier.prefetch(name, [_key(0)], 1000) for name in ("first", "second")]
    until = time.monotonic() + 20
    while reads != [0, 1] and time.monotonic() < until:
        rig.tier.poll()
    # The first shard has come; the page is not complete.
    assert rig.tier.is_incoming(_key(0))
    assert not rig.index.has(_key(0))
    gate.set()
    while not all(operation.ended for operation in both) and time.monotonic() < until:
        rig.tier.poll()
    assert reads == [0, 1]
    assert [operation.loaded for operation in both] == [1, 1]
    rig.check(0)


def test_a_page_that_has_come_for_another_request_does_not_end_the_prefix(rig: _Rig) -> None:
    """It came while this request's pages waited for others to be read."""
    rig.store(*range(2), forget=True)
    rig.keep(0)
    assert rig.fetch(0, 1).loaded == 2
    assert rig.index.has(_key(1))


def test_volatile_pages_stay_in_memory(rig: _Rig) -> None:
    page = rig.keep(0)
    page.volatile = True
    rig.tier.store([page])
    rig.settle()
    assert rig.tier.written == 0
    assert not rig.tier.contains([_key(0)])[_key(0)]


def _holds(rig: _Rig) -> int:
    page = rig.index.get(_key(0))
    return page.holds if page is not None else -1


def test_pages_are_held_while_they_are_written(rig: _Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    _, gate = rig.hang(monkeypatch, "write")
    page = rig.keep(0)
    rig.tier.store([page])
    assert _holds(rig) == 1
    assert rig.index.reserve([_key(number) for number in range(1, SLOTS + 1)]) is None
    gate.set()
    rig.settle()
    assert _holds(rig) == 0


def test_pages_of_a_step_are_held_at_once(rig: _Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What several engines share is locked for them; those that have left are left out."""
    pages, hold, asked = [rig.keep(number) for number in range(4)], rig.index.hold, list[int]()
    monkeypatch.setattr(rig.index, "hold", lambda keys: asked.append(len(keys)) or hold(keys))
    rig.tier.store(pages)
    rig.settle()
    assert asked == [4]
    rig.index.forget(hold([_key(1)]) or ())
    rig.tier.store([replace(page, indexed=True) for page in pages])
    rig.settle()
    assert (rig.tier.written, rig.tier.declined) == (7, 1)


def test_nothing_written_before_a_reset_is_read_after_it(rig: _Rig) -> None:
    rig.tier.store([rig.keep(number) for number in range(4)])
    rig.forget()
    assert rig.tier.reset()
    rig.settle()
    assert not any(rig.tier.contains([_key(number) for number in range(4)]).values())
    assert rig.fetch(0, 1).loaded == 0
    assert rig.index.num_free == SLOTS


def test_writes_that_a_reset_drops_are_no_errors(
    rig: _Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alert on errors of storage would fire at each reset."""
    begun, gate = rig.hang(monkeypatch, "write")
    stats = HiCacheStats(data={})
    prefetches = StorageReads(rig.tier, rig.geometry, rig.index, None, stats)  # type: ignore[arg-type]
    threads = PrefetchConfig().threads
    rig.tier.store([rig.keep(number) for number in range(threads)])
    while rig.tier._writer._queue:
        time.sleep(0.005)
    assert begun.wait(20)
    # Each thread writes a page, and two wait.
    rig.tier.store([rig.keep(threads), rig.keep(threads + 1)])
    threading.Timer(0.05, gate.set).start()
    assert prefetches.reset()
    rig.settle()
    prefetches.poll()
    assert (stats.data["dropped_writes"], stats.data["written_pages"]) == (2, threads)
    assert stats.data["storage_errors"] == stats.data["declined_writes"] == 0
    # A failed read or write is an error; a write without room is not.
    monkeypatch.setattr(rig.backend, "write", lambda *_: False)
    rig.store(10)
    rig.backend.full = True
    rig.store(11)
    prefetches.poll()
    assert (stats.data["storage_errors"], stats.data["declined_writes"]) == (1, 1)
    monkeypatch.setattr(rig.backend, "contains", lambda keys: [True] * len(keys))
    monkeypatch.setattr(rig.backend, "read", lambda *_: ReadStatus.CORRUPT)
    rig.fetch(12)
    prefetches.poll()
    assert stats.data["storage_errors"] > 1


def test_a_flush_that_raises_is_counted_and_ends_no_thread(
    rig: _Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_threads, "FLUSH_SECONDS", 0.0)
    stock = rig.backend.flush
    monkeypatch.setattr(rig.backend, "flush", raising(OSError("gone")))
    # These are more stores than there are threads.
    for number in range(10):
        rig.store(number)
    assert (rig.tier.written, rig.tier.errors) == (10, 10)
    monkeypatch.setattr(rig.backend, "flush", lambda: False)
    rig.store(10)
    assert rig.tier.errors == 11
    monkeypatch.setattr(rig.backend, "flush", stock)
    rig.store(11)
    assert (rig.tier.written, rig.tier.errors) == (12, 11)
    assert rig.tier._writer.close(20), "it is drained"


@pytest.mark.parametrize("hangs_in", ["clear", "write"])
def test_a_reset_does_not_wait_for_storage_that_hangs(
    rig: _Rig, monkeypatch: pytest.MonkeyPatch, hangs_in: str
) -> None:
    monkeypatch.setattr(tier_module, "RESET_SECONDS", 0.05)
    rig.store(0)
    begun, gate = rig.hang(monkeypatch, hangs_in)
    rig.tier.store([rig.keep(1)])
    if hangs_in == "write":
        assert begun.wait(20)
    else:
        rig.settle()
    rig.forget()
    assert not rig.tier.reset()
    assert not rig.tier.reset(), "a second one waits for the same"
    # Until storage has forgotten its pages, nothing is offered and nothing is kept.
    assert rig.tier.contains([_key(0)]) == {_key(0): False}
    rig.tier.store([rig.keep(2)])
    assert rig.tier.declined == 1
    gate.set()
    rig.tier._reset.join(20)
    assert rig.tier.reset()
    rig.settle()
    assert not any(rig.tier.contains([_key(number) for number in range(3)]).values())
    rig.store(3)
    assert rig.tier.contains([_key(3)]) == {_key(3): True}


def test_a_read_that_hangs_does_not_hold_up_the_end(
    rig: _Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "DRAIN_SECONDS", 0.05)
    rig.store(0, forget=True)
    begun, gate = rig.hang(monkeypatch, "read")
    rig.tier.prefetch("r", [_key(0)], 1000)
    assert begun.wait(20)
    rig.tier.close()
    gate.set()
    assert rig.tier._prefetcher.close(), "the thread ends with the read"


def test_a_lookup_that_raises_finds_nothing_and_is_an_error(
    rig: _Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.backend, "contains", raising(SystemExit(3)))
    assert rig.tier.contains([_key(1), _key(2)]) == {_key(1): False, _key(2): False}
    assert rig.tier.errors == 1

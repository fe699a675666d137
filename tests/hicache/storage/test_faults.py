"""Injected faults: they happen as configured, and none of them makes a store lie."""

import math
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.host_cache.prefetches import wait_for
from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.faults.injector import (
    FaultInjector,
    FaultKind,
    FaultOptions,
    InjectedFault,
    asked_for,
)
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.setup import make_injector
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.faulty import FaultyFiles, inject
from vllm_graft.hicache.storage.segments import space
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.hicache.storage.tier.io_threads import Slot
from vllm_graft.hicache.storage.tier.prefetcher import Prefetcher
from vllm_graft.testing.contracts.cache_contracts import NAMESPACE, page_key, page_of, read_page

FAULTS = 10_000
KEYS = [page_key(number) for number in range(60)]


pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


@pytest.fixture(autouse=True)
def _ask_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "FULL_SECONDS", 0)


def injector(rate: float, seed: int = 7, *kinds: FaultKind) -> FaultInjector:
    options = FaultOptions(seed=seed, rate=rate, slow_seconds=0)
    return FaultInjector(options.model_copy(update={"kinds": kinds}) if kinds else options)


def open_store(path: Path, faults: FaultInjector) -> StorageBackend:
    """Open a store whose recovery already runs into faults."""
    files = FaultyFiles(faults)
    options = {"path": path, "max_bytes": "1MiB", "segment_bytes": "64KiB", "sync_bytes": 30_000}
    return inject(SegmentsBackend(NAMESPACE, options, files), faults)


def test_ten_thousand_faults_and_no_wrong_byte(tmp_path: Path) -> None:
    faults, rng = injector(0.2), random.Random(3)
    statuses: Counter[ReadStatus] = Counter()
    store = open_store(tmp_path, faults)
    injected = 0
    while injected < FAULTS:
        for _ in range(500):
            key, action = rng.choice(KEYS), rng.random()
            if action < 0.5:
                status, page = read_page(store, key)
                statuses[status] += 1
                assert status is not ReadStatus.HIT or page == page_of(key)
            elif action < 0.98:
                store.write(key, memoryview(page_of(key)))
            elif action < 0.99:
                store.remove(key)
            else:
                store.flush()
        if rng.random() < 0.2:
            store.close()
            store = open_store(tmp_path, faults)
        injected = faults.counters.snapshot().get("injected", 0)
    assert set(statuses) == set(ReadStatus)
    assert statuses[ReadStatus.HIT] > 1000
    counted = faults.counters.snapshot()
    for name in ("pread_corrupt", "pread_short", "pread_failing", "pwrite_corrupt", "pwrite_short"):
        assert counted[name] > 100, counted


def test_without_checksums_it_would_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the same faults, without checksums."""
    monkeypatch.setattr("vllm_graft.hicache.storage.segments.segment.verify", lambda *_: True)
    store = open_store(tmp_path, injector(0.3))
    wrong = 0
    for _ in range(20):
        for key in KEYS:
            store.write(key, memoryview(page_of(key)))
            status, page = read_page(store, key)
            wrong += status is ReadStatus.HIT and page != page_of(key)
    assert wrong > 10


def test_the_seed_says_which() -> None:
    def decisions(seed: int) -> list[FaultKind | None]:
        faults = injector(0.5, seed)
        return [faults.decide("read", tuple(FaultKind)) for _ in range(200)]

    assert decisions(1) == decisions(1)
    assert decisions(1) != decisions(2)
    assert FaultKind.KILLED not in decisions(1)
    assert {kind for kind in decisions(1) if kind} == set(FaultOptions().kinds)


def test_the_rate_is_kept_and_counted() -> None:
    faults = injector(0.25)
    hits = sum(faults.decide("copy", (FaultKind.SLOW,)) is not None for _ in range(4000))
    assert 800 < hits < 1200
    assert faults.counters.snapshot() == {"injected": hits, "copy_slow": hits}
    assert all(injector(0).decide("copy", tuple(FaultKind)) is None for _ in range(100))


def test_a_copy_fails_by_raising() -> None:
    faults = injector(1.0, 7, FaultKind.FAILING)
    with pytest.raises(InjectedFault):
        faults.before("copy")
    # Copies have no corruption fault, because their bytes are already past the checksums.
    faults = injector(1.0, 7, FaultKind.CORRUPT)
    faults.before("copy")
    assert faults.counters.snapshot() == {}


def test_a_slow_operation_is_late() -> None:
    options = FaultOptions(rate=1, kinds=(FaultKind.SLOW,), slow_seconds=0.05)
    start = time.monotonic()
    FaultInjector(options).before("copy")
    assert time.monotonic() - start >= 0.05


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"rate": 2}', "VLLM_GRAFT_FAULTS.rate: 2 is refused"),
        ('{"kinds": ["flood"]}', "VLLM_GRAFT_FAULTS.kinds[0]: 'flood' is refused"),
        ('{"kinds": "slow"}', "VLLM_GRAFT_FAULTS.kinds: 'slow' is refused"),
        ('{"sed": 1}', "VLLM_GRAFT_FAULTS.sed: unknown key. Did you mean 'seed'?"),
        ("all", "VLLM_GRAFT_FAULTS: 'all' is refused"),
    ],
)
def test_wrong_options_are_errors(text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_GRAFT_FAULTS", text)
    with pytest.raises(ConfigError) as caught:
        make_injector()
    assert words in str(caught.value)


def test_the_environment_asks_for_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_injector() is None
    monkeypatch.setenv("VLLM_GRAFT_FAULTS", '{"kinds": ["slow"]}')
    options = asked_for()
    assert options is not None
    assert options.kinds == (FaultKind.SLOW,)
    assert make_injector() is not None


class Pool:
    """Slots of a host pool, and the bytes of pages that were published."""

    def __init__(self, slots: int) -> None:
        self.free = [bytearray(3000) for _ in range(slots)]
        self.published: dict[PageKey, bytes] = {}

    def has(self, key: PageKey) -> bool:
        return False

    def allocate(self, key: PageKey) -> Slot | None:
        return Slot(0, memoryview(self.free.pop())) if self.free else None

    def publish(self, key: PageKey, slot: Slot) -> None:
        self.published[key] = bytes(slot.buffer)
        self.release(key, slot)

    def release(self, key: PageKey, slot: Slot) -> None:
        buffer = slot.buffer.obj
        assert isinstance(buffer, bytearray)
        self.free.append(buffer)


def test_prefetch_under_faults_ends_and_gives_everything_back(tmp_path: Path) -> None:
    faults = injector(0.3)
    store, pool = open_store(tmp_path, faults), Pool(8)
    prefetcher = Prefetcher(store, pool, threads=3, budget_bytes=15_000)
    rng = random.Random(5)
    for number in range(150):
        for key in KEYS:
            store.write(key, memoryview(page_of(key)))
        first = rng.randrange(len(KEYS))
        operation = prefetcher.start(str(number), KEYS[first : first + 10], math.inf)
        if rng.random() < 0.3:
            threading.Thread(target=operation.cancel).start()
        wait_for(prefetcher, operation)
    prefetcher.close()
    assert len(pool.free) == 8
    assert prefetcher.bytes_in_flight == 0
    assert pool.published
    assert all(page == page_of(key) for key, page in pool.published.items())

"""Injected faults of a disk: none of them makes a store lie."""

import math
import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.support.host_cache.faults import Faults, FaultyFiles
from tests.support.host_cache.prefetches import wait_for
from vllm_graft.hicache.host.eviction import LruPolicy
from vllm_graft.hicache.host.index import HostIndex
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.segments import space
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.hicache.storage.tier.prefetcher import Prefetcher
from vllm_graft.testing.contracts.cache_contracts import NAMESPACE, page_key, page_of, read_page

FAULTS = 10_000
KEYS = [page_key(number) for number in range(60)]


pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


@pytest.fixture(autouse=True)
def _ask_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "FULL_SECONDS", 0)


def open_store(path: Path, faults: Faults) -> StorageBackend:
    """Open a store whose recovery already runs into faults."""
    options = {"path": path, "max_bytes": "1MiB", "segment_bytes": "64KiB", "sync_bytes": 30_000}
    return SegmentsBackend(NAMESPACE, options, FaultyFiles(faults))


def test_ten_thousand_faults_and_no_wrong_byte(tmp_path: Path) -> None:
    faults, rng = Faults(0.2), random.Random(3)
    statuses: Counter[ReadStatus] = Counter()
    store = open_store(tmp_path, faults)
    while faults.counts["injected"] < FAULTS:
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
    assert set(statuses) == set(ReadStatus)
    assert statuses[ReadStatus.HIT] > 1000
    for name in ("pread_corrupt", "pread_short", "pread_failing", "pwrite_corrupt", "pwrite_short"):
        assert faults.counts[name] > 100, faults.counts


def test_without_checksums_it_would_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the same faults, without checksums."""
    monkeypatch.setattr("vllm_graft.hicache.storage.segments.segment.verify", lambda *_: True)
    store = open_store(tmp_path, Faults(0.3))
    wrong = 0
    for _ in range(20):
        for key in KEYS:
            store.write(key, memoryview(page_of(key)))
            status, page = read_page(store, key)
            wrong += status is ReadStatus.HIT and page != page_of(key)
    assert wrong > 10


def test_prefetch_under_faults_ends_and_gives_everything_back(tmp_path: Path) -> None:
    store, index = open_store(tmp_path, Faults(0.3)), HostIndex(8, LruPolicy(8), {0: 3000})
    slots = [memoryview(bytearray(3000)) for _ in range(8)]
    prefetcher = Prefetcher(
        store, index, lambda page: ((page.key, slots[page.slot]),), threads=3, budget_bytes=15_000
    )
    rng = random.Random(5)
    loaded = 0
    for number in range(150):
        for key in KEYS:
            store.write(key, memoryview(page_of(key)))
        first = rng.randrange(len(KEYS))
        operation = prefetcher.start(str(number), KEYS[first : first + 10], math.inf)
        if rng.random() < 0.3:
            threading.Thread(target=operation.cancel).start()
        wait_for(prefetcher, operation)
        pages = [page for key in KEYS if (page := index.get(key)) is not None and page.ready]
        assert all(bytes(slots[page.slot]) == page_of(page.key) for page in pages)
        loaded += len(pages)
        index.clear()
    prefetcher.close()
    assert index.num_free == 8
    assert prefetcher.bytes_in_flight == 0
    assert loaded > 100

"""vLLM's tiers as a storage backend: their pages are checked, and their limits are reported."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.storage.backend import ReadStatus
from vllm_graft.hicache.storage.vllm_tiers.store import VllmTierBackend
from vllm_graft.testing.contracts.cache_contracts import (
    NAMESPACE,
    OTHER,
    page_key,
    page_of,
    read_page,
)

Open = Callable[..., VllmTierBackend]
KEYS = [page_key(number, number % 2) for number in range(12)]


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Open]:
    stores: list[VllmTierBackend] = []

    def build(namespace: bytes = NAMESPACE, **options: Any) -> VllmTierBackend:
        tier = {"type": "fs", "root_dir": str(tmp_path), "n_read_threads": 2, "n_write_threads": 2}
        values = {"tier": tier, "page_bytes": 5000, "slots": 4, "timeout_seconds": 20.0} | options
        stores.append(VllmTierBackend(namespace, values))
        return stores[-1]

    yield build
    for store in stores:
        store.close()


def write_all(store: VllmTierBackend) -> None:
    for key in KEYS:
        assert store.write(key, memoryview(page_of(key)))


def test_what_was_written_is_read_and_outlives_the_process(open_tier: Open) -> None:
    first = open_tier()
    write_all(first)
    assert [read_page(first, key) for key in KEYS] == [
        (ReadStatus.HIT, page_of(key)) for key in KEYS
    ]
    first.close()
    assert read_page(first, KEYS[0])[0] is ReadStatus.MISS
    assert not first.write(page_key(99), memoryview(b"page"))
    second = open_tier()
    assert read_page(second, KEYS[3]) == (ReadStatus.HIT, page_of(KEYS[3]))
    assert read_page(second, page_key(99))[0] is ReadStatus.MISS
    assert second.contains([KEYS[3], page_key(99)]) == [True, False]
    other = open_tier(OTHER)
    assert read_page(other, KEYS[3])[0] is ReadStatus.MISS


def test_bits_that_the_tier_does_not_check_are_found_out(open_tier: Open, tmp_path: Path) -> None:
    """The tier itself serves such pages, as the control at the end shows."""
    store = open_tier()
    write_all(store)
    for file in tmp_path.rglob("*.bin"):
        content = bytearray(file.read_bytes())
        content[1000] ^= 1
        file.write_bytes(content)
    assert [read_page(store, key)[0] for key in KEYS] == [ReadStatus.CORRUPT] * len(KEYS)
    assert store.contains(KEYS) == [False] * len(KEYS)
    # The write is declined, because the tier would keep the bad page.
    assert not store.write(KEYS[0], memoryview(page_of(KEYS[0])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_graft.hicache.storage.vllm_tiers.store.verify", lambda *_: True)
        control = open_tier()
        status, page = read_page(control, KEYS[0])
    assert status is ReadStatus.HIT
    assert page != page_of(KEYS[0])


def test_what_was_missed_can_be_written(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_graft.hicache.storage.vllm_tiers.store.MAX_MISSING", 2)
    store = open_tier()
    assert [read_page(store, key)[0] for key in KEYS] == [ReadStatus.MISS] * len(KEYS)
    assert 1 <= store.contains(KEYS).count(False) <= 2
    write_all(store)
    assert store.contains(KEYS) == [True] * len(KEYS)
    assert read_page(store, KEYS[-1]) == (ReadStatus.HIT, page_of(KEYS[-1]))


def test_a_tier_that_keeps_nothing_is_found_out(open_tier: Open) -> None:
    """vLLM's example tier says that it has a chunk, and moves no bytes."""
    store = open_tier(tier={"type": "example"}, slots=1)
    assert store.write(KEYS[0], memoryview(page_of(KEYS[0])))
    assert store.write(KEYS[1], memoryview(page_of(KEYS[1])))
    assert read_page(store, KEYS[0])[0] is ReadStatus.CORRUPT


def test_cleared_it_serves_nothing_and_says_that_it_is_there(open_tier: Open) -> None:
    store = open_tier()
    write_all(store)
    assert store.clear() is False
    assert [read_page(store, key)[0] for key in KEYS] == [ReadStatus.MISS] * len(KEYS)
    store.remove(page_key(50))
    assert not store.write(page_key(50), memoryview(b"page"))
    later = page_key(60)
    assert store.write(later, memoryview(page_of(later)))
    assert read_page(store, later) == (ReadStatus.HIT, page_of(later))


def test_more_threads_than_slots(open_tier: Open) -> None:
    store, failures = open_tier(), []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(15):
            key = rng.choice(KEYS)
            if rng.random() < 0.5 and not store.write(key, memoryview(page_of(key))):
                failures.append("declined")
            status, page = read_page(store, key)
            if status is ReadStatus.HIT and page != page_of(key):
                failures.append("wrong bytes")

    write_all(store)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert store.stats()["read_hits"] > 60


def test_a_tier_that_hangs_costs_time_and_its_slot_until_it_is_done(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    finished = FileSystemTierManager.get_finished_jobs
    monkeypatch.setattr(
        FileSystemTierManager,
        "get_finished_jobs",
        lambda self: finished(self) if gate.is_set() else [],
    )
    store = open_tier(slots=2, timeout_seconds=0.2)
    for key in KEYS[:3]:
        assert not store.write(key, memoryview(page_of(key)))
    # The tier has both slots, so the third write got none.
    assert store._slots.empty()
    gate.set()
    store.close()
    assert store._slots.qsize() == 2


def test_a_tier_that_raises_is_not_used_any_more(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FileSystemTierManager, job: object) -> None:
        raise RuntimeError("tier")

    monkeypatch.setattr(FileSystemTierManager, "submit_store", fail)
    store = open_tier()
    assert not store.write(KEYS[0], memoryview(page_of(KEYS[0])))
    assert not store.write(KEYS[1], memoryview(page_of(KEYS[1])))
    assert read_page(store, KEYS[2])[0] is ReadStatus.ERROR


def test_wrong_options_are_errors(open_tier: Open) -> None:
    with pytest.raises(ConfigError, match=r"storage\.tier: vLLM's tier 'tape' cannot be made"):
        open_tier(tier={"type": "tape"})
    with pytest.raises(ConfigError, match=r"storage\.page_bytes"):
        open_tier(page_bytes=0)
    assert not open_tier().write(KEYS[0], memoryview(bytes(5001)))


def test_staging_memory_that_holds_no_page_is_told_before_a_tier_is_made(tmp_path: Path) -> None:
    options = {"tier": {"type": "fs", "root_dir": str(tmp_path)}, "page_bytes": 5000}
    assert VllmTierBackend.too_small(options, 5000) is None
    problem = VllmTierBackend.too_small(options, 5001) or ""
    assert "storage.page_bytes is 5000, but a page of KV takes 5001 bytes" in problem

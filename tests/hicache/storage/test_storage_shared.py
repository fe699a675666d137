"""``max_bytes`` bounds a directory: all namespaces in it, and all processes that write to it."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_cache import storage_sharers
from tests.support.host_cache.storage_sharers import (
    MAX_BYTES,
    OPTIONS,
    namespace,
    open_store,
    stored_bytes,
    write_pages,
)
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.segments import space
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.testing.contracts.cache_contracts import page_key, page_of, read_page

pytestmark = pytest.mark.usefixtures("tests_importable")


@pytest.fixture(autouse=True)
def _ask_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "FULL_SECONDS", 0)


def _right(store: StorageBackend, numbers: range) -> int:
    """Count hits; check that each is right, and that all others are misses."""
    hits = 0
    for number in numbers:
        status, found = read_page(store, page_key(number))
        assert status in (ReadStatus.HIT, ReadStatus.MISS)
        if status is ReadStatus.HIT:
            assert found == page_of(page_key(number))
            hits += 1
    return hits


def test_four_open_namespaces_come_to_no_more_than_the_bound(tmp_path: Path) -> None:
    stores = [open_store(tmp_path, number) for number in range(4)]
    most = 0
    for start in range(0, 400, 20):
        for store in stores:
            write_pages(store, range(start, start + 20))
            most = max(most, stored_bytes(tmp_path))
    assert MAX_BYTES * 0.6 < most <= MAX_BYTES
    for store in stores:
        # Every store has some room, and reads its own pages.
        assert store.stats()["bytes"] > MAX_BYTES / 10
        assert _right(store, range(400)) * 3000 > MAX_BYTES / 10
        assert store.flush()
        store.close()
    again = [open_store(tmp_path, number) for number in range(4)]
    assert stored_bytes(tmp_path) <= MAX_BYTES
    assert all(_right(store, range(400)) for store in again)


def test_whoever_has_all_gives_way_to_who_comes_later(tmp_path: Path) -> None:
    first = open_store(tmp_path, 0)
    write_pages(first, range(400))
    assert stored_bytes(tmp_path) > MAX_BYTES * 0.8
    second = open_store(tmp_path, 1)
    for start in range(400, 800, 10):
        write_pages(first, range(start, start + 10))
        assert first.flush()
        write_pages(second, range(start, start + 10))
        assert stored_bytes(tmp_path) <= MAX_BYTES
    assert first.stats()["bytes"] > MAX_BYTES * 0.3
    assert second.stats()["bytes"] > MAX_BYTES * 0.3
    assert _right(second, range(400, 800)) > 50
    # The first takes the room back when the other has gone.
    second.close()
    write_pages(first, range(800, 1200))
    assert MAX_BYTES * 0.8 < stored_bytes(tmp_path) <= MAX_BYTES
    assert first.stats()["bytes"] > MAX_BYTES * 0.8


def test_a_smaller_bound_is_kept_from_the_start(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0, max_bytes=2 * MAX_BYTES)
    write_pages(store, range(800))
    store.close()
    assert stored_bytes(tmp_path) > MAX_BYTES
    other = open_store(tmp_path, 1)
    assert MAX_BYTES * 0.8 < stored_bytes(tmp_path) <= MAX_BYTES
    other.close()


def test_files_that_no_store_knows_count_as_well(tmp_path: Path) -> None:
    """Segments of a later format, or unreadable ones, leave less room for others."""
    store = SegmentsBackend(namespace(0), {"path": tmp_path, **OPTIONS})
    write_pages(store, range(400))
    foreign = tmp_path / namespace(0).hex() / "0123456789abcdef.index"
    foreign.write_bytes(bytes(MAX_BYTES // 2))
    write_pages(store, range(400, 600))
    assert MAX_BYTES // 2 < stored_bytes(tmp_path) <= MAX_BYTES
    assert _right(store, range(600)) > 50


def test_what_is_left_by_others_is_too_little_for_a_segment(tmp_path: Path) -> None:
    """Then nothing is written, the declined pages are counted, and the bound holds."""
    options = {**OPTIONS, "segment_bytes": MAX_BYTES // 2}
    stores = [open_store(tmp_path, number, **options) for number in range(3)]
    for store in stores:
        write_pages(store, range(40))
    assert stores[2].stats()["declined_full"] == 40
    assert [store.stats()["pages"] for store in stores] == [40, 40, 0]
    assert stored_bytes(tmp_path) <= MAX_BYTES


def test_a_full_segment_holds_the_removals_of_all_its_pages(tmp_path: Path) -> None:
    """Each removal takes an entry in the index, whose room is reserved from the start."""
    store = open_store(tmp_path, 0)
    write_pages(store, range(1000), length=20)
    assert store.flush()
    for number in range(1000):
        store.remove(page_key(number))
    assert store.flush()
    files = list((tmp_path / namespace(0).hex()).glob("*.data"))
    assert len(files) > 1
    for file in files:
        size = file.stat().st_size + file.with_suffix(".index").stat().st_size
        assert size <= OPTIONS["segment_bytes"]


def test_processes_that_write_and_are_killed_stay_within_the_bound(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")

    def started(number: int) -> Any:
        process = context.Process(target=storage_sharers.write_on, args=(tmp_path, number))
        process.start()
        return process

    running = [started(number) for number in range(4)]
    draw = random.Random(3)
    most, killed, end = 0, 0, time.monotonic() + 60
    # It runs until four processes were killed and the bound was nearly reached.
    while (killed < 4 or most < MAX_BYTES * 0.6) and time.monotonic() < end:
        for _ in range(20):
            most = max(most, stored_bytes(tmp_path))
            time.sleep(0.01)
        if most > MAX_BYTES // 4:
            victim = draw.randrange(4)
            os.kill(running[victim].pid, signal.SIGKILL)
            running[victim].join()
            running[victim] = started(victim)
            killed += 1
    for process in running:
        process.kill()
        process.join()
    assert MAX_BYTES * 0.6 < most <= MAX_BYTES
    # Claims of killed processes do not count.
    store = open_store(tmp_path, 9)
    write_pages(store, range(400))
    assert stored_bytes(tmp_path) <= MAX_BYTES
    assert store.stats()["bytes"] > MAX_BYTES * 0.8

"""Stores, some of which share a directory; spawned processes can import this file."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.testing.contracts.cache_contracts import page_key, page_of, read_page

MAX_BYTES = 1 << 20
OPTIONS = {"max_bytes": MAX_BYTES, "segment_bytes": 64 << 10, "sync_bytes": 32 << 10}
_STORED = (".data", ".index")


def namespace(number: int) -> bytes:
    return bytes([number] * 16)


def open_store(path: Path, number: int, **options: Any) -> StorageBackend:
    """Open a store of a namespace below ``path``."""
    return SegmentsBackend(namespace(number), {"path": path, **OPTIONS, **options})


def stored_bytes(path: Path) -> int:
    """Sum up the bytes of all files of pages below ``path``; files may vanish meanwhile."""
    total = 0
    for file in path.rglob("*"):
        if file.suffix in _STORED:
            try:
                total += file.stat().st_size
            except FileNotFoundError:
                continue
    return total


def disk_bytes(path: Path) -> int:
    """Sum up the bytes of all files below ``path``."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def write_all(store: StorageBackend, keys: Sequence[PageKey]) -> list[bool]:
    return [store.write(key, memoryview(page_of(key))) for key in keys]


def hits(store: StorageBackend, keys: Sequence[PageKey]) -> list[bool]:
    """Whether each page is there; one that is there is right."""
    found = [read_page(store, key) for key in keys]
    there = [status is ReadStatus.HIT for status, _ in found]
    assert all(page == page_of(key) for key, (_, page), hit in zip(keys, found, there) if hit)
    return there


def write_pages(store: StorageBackend, numbers: Iterable[int], length: int | None = None) -> int:
    """Write the pages of these numbers; return how many were kept."""
    pages = ((page_key(number), page_of(page_key(number))[:length]) for number in numbers)
    return sum(store.write(key, memoryview(page)) for key, page in pages)


def write_on(path: Path, number: int) -> None:
    """Write pages until killed."""
    store = open_store(path, number)
    for start in itertools.count(0, 10):
        write_pages(store, range(start, start + 10))
        store.flush()

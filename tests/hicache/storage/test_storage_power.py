"""A power failure, which keeps or loses bytes that were not synced, and kill -9 in mid-write."""

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.host_cache import storage_writer
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus
from vllm_graft.hicache.storage.files import Files
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.testing.contracts.cache_contracts import NAMESPACE, page_key, page_of, read_page

SECTOR = 512


@dataclass(frozen=True)
class Operation:
    """A system call; ``flushed`` is how many pages flush() had promised before it."""

    kind: str
    name: str = ""
    offset: int = 0
    data: bytes = b""
    flushed: int = 0


class Journal(Files):
    def __init__(self) -> None:
        self.log: list[Operation] = []
        self.names: dict[int, str] = {}

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self.names[fd] = path.name
        self.log.append(Operation("create", path.name))
        return fd

    def open(self, path: Path) -> int:
        fd = super().open(path)
        self.names[fd] = path.name
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        # It is written in pieces, so that the power can fail between them.
        data = b"".join(bytes(buffer) for buffer in buffers)[:1777]
        self.log.append(Operation("write", self.names[fd], offset, data))
        return super().pwritev(fd, [memoryview(data)], offset)

    def fdatasync(self, fd: int) -> None:
        self.log.append(Operation("sync", self.names[fd]))

    def sync_directory(self, path: Path) -> None:
        self.log.append(Operation("sync_names"))


def disk_after(log: Sequence[Operation], rng: random.Random) -> dict[str, bytearray]:
    """Make a disk as the power failure may leave it: synced writes, and any part of the others."""
    durable: dict[str, bytearray] = {}
    loose: list[Operation] = []
    named: set[str] = set()
    created: list[str] = []
    for operation in log:
        if operation.kind == "create":
            created.append(operation.name)
            durable[operation.name] = bytearray()
        elif operation.kind == "sync_names":
            named.update(created)
        elif operation.kind == "write":
            loose.append(operation)
        elif operation.kind == "sync":
            for write in [one for one in loose if one.name == operation.name]:
                put(durable, write)
                loose.remove(write)
    rng.shuffle(loose)
    for write in loose:
        tear(durable, write, rng)
    return {name: data for name, data in durable.items() if name in named or rng.random() < 0.5}


def put(disk: dict[str, bytearray], write: Operation) -> None:
    data = disk[write.name]
    data.extend(bytes(max(0, write.offset + len(write.data) - len(data))))
    data[write.offset : write.offset + len(write.data)] = write.data


def tear(disk: dict[str, bytearray], write: Operation, rng: random.Random) -> None:
    fate = rng.choice(("lost", "whole", "zeros", "sectors"))
    if fate == "whole":
        put(disk, write)
    elif fate == "zeros":
        put(disk, Operation("write", write.name, write.offset, bytes(len(write.data))))
    elif fate == "sectors":
        for start in range(0, len(write.data), SECTOR):
            if rng.random() < 0.5:
                part = write.data[start : start + SECTOR]
                put(disk, Operation("write", write.name, write.offset + start, part))


def write_down(path: Path, keys: list[PageKey], flush_every: int) -> list[Operation]:
    """Record the system calls of a store that writes ``keys`` and flushes at times."""
    journal = Journal()
    options = {"path": path, "max_bytes": "8MiB", "segment_bytes": "64KiB", "sync_bytes": 9000}
    store = SegmentsBackend(NAMESPACE, options, journal)
    for number, key in enumerate(keys, 1):
        assert store.write(key, memoryview(page_of(key)))
        if number % flush_every == 0:
            assert store.flush()
            journal.log.append(Operation("promise", flushed=number))
    store.close()
    return journal.log


@pytest.mark.parametrize("flush_every", [4, 100])
def test_promises_are_kept_and_nothing_is_wrong(tmp_path: Path, flush_every: int) -> None:
    keys = [page_key(number) for number in range(40)]
    log = write_down(tmp_path / "first", keys, flush_every)
    rng = random.Random(flush_every)
    salvaged = missing = 0
    for crash in range(120):
        end = rng.randrange(len(log) + 1)
        promised = max([0, *(one.flushed for one in log[:end])])
        root = tmp_path / f"crash{crash}"
        directory = root / NAMESPACE.hex()
        directory.mkdir(parents=True)
        for name, data in disk_after(log[:end], rng).items():
            (directory / name).write_bytes(data)
        store = SegmentsBackend(NAMESPACE, {"path": root, "max_bytes": "8MiB"})
        for number, key in enumerate(keys):
            status, found = read_page(store, key)
            if status is ReadStatus.HIT:
                assert found == page_of(key)
            else:
                missing += 1
            assert status is ReadStatus.HIT or number >= promised
            # Records that the index names were durable before, so they can't be corrupt.
            assert status is not ReadStatus.CORRUPT
        salvaged += store.stats().get("salvaged_pages", 0)
        store.close()
    assert missing > 0
    assert salvaged > 0


def test_an_index_that_came_first_would_be_found_out(tmp_path: Path) -> None:
    """Negative control: were the index synced and the data not, pages would be corrupt."""
    keys = [page_key(number) for number in range(20)]
    log = write_down(tmp_path / "first", keys, 4)
    swapped = [one for one in log if not (one.kind == "sync" and one.name.endswith(".data"))]
    rng = random.Random(3)
    directory = tmp_path / "crash" / NAMESPACE.hex()
    directory.mkdir(parents=True)
    for name, data in disk_after(swapped, rng).items():
        (directory / name).write_bytes(data)
    store = SegmentsBackend(NAMESPACE, {"path": directory.parent, "max_bytes": "8MiB"})
    found = [(read_page(store, key), page_of(key)) for key in keys]
    assert any(status is ReadStatus.CORRUPT for (status, _), _ in found)
    # Even so, no wrong page is served.
    assert all(page == right for (status, page), right in found if status is ReadStatus.HIT)


KILLS = int(os.environ.get("GRAFT_KILLS", "10"))
"""The bar is 200."""
STRIDE = 100_000


def run_and_kill(path: Path, first: int, seed: int, seconds: float) -> list[int]:
    """Run and kill the writer; return the pages that it had reported as durable."""
    with storage_writer.started(path, first, seed) as writer:
        time.sleep(seconds)
        writer.send_signal(signal.SIGKILL)
        assert writer.stdout is not None
        lines = writer.stdout.read().splitlines()
        assert writer.wait(30) == -signal.SIGKILL
    return [int(line) for line in lines]


@pytest.mark.timeout(120 + 10 * KILLS)
def test_killed_in_mid_write(tmp_path: Path) -> None:
    rng = random.Random(1)
    hits = cut = salvaged = promised = 0
    for kill in range(KILLS):
        first = kill * STRIDE
        # Every other time the writer kills itself, certainly in the middle of a write.
        durable = run_and_kill(tmp_path, first, kill * (kill % 2), rng.uniform(0.0, 0.25))
        store = storage_writer.open_store(tmp_path)
        newest = range(first, max([first, *durable]) + 30)
        for number in [*newest, *(rng.randrange(first + 1) for _ in range(20))]:
            status, page = read_page(store, page_key(number), storage_writer.PAGE_BYTES)
            if status is ReadStatus.HIT:
                hits += 1
                assert page == page_of(page_key(number), storage_writer.PAGE_BYTES)
            # No page that recovery accepted is corrupt.
            assert status in (ReadStatus.HIT, ReadStatus.MISS)
        # The last flushed page is promised, unless the writer removes it 15 pages later.
        for number in durable[-1:]:
            if (number + 15) % 11:
                promised += 1
                assert store.contains([page_key(number)]) == [True]
        stats = store.stats()
        cut += stats.get("cut_bytes", 0) > 0
        salvaged += stats.get("salvaged_pages", 0)
        store.close()
    assert hits > 0
    assert promised > 0
    print(f"{kill + 1} kills, {hits=}, {promised=}, torn tails {cut}, {salvaged=}")

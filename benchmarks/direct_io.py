"""Time pages of KV on a disk through the page cache (buffered) and past it (O_DIRECT).

    python -m benchmarks.direct_io /var/cache --page-bytes 131072 2097152 --threads 1 4 16

All arms write and read what the ``segments`` store does: one ``pwritev`` or ``preadv`` per record,
the record's header and its checksum, pages in random order, and an ``fdatasync`` per 64 MiB. Only
the place differs: a buffered record begins where the last one ended, as in a segment; for O_DIRECT
the header has a block of 4096 bytes of its own, so that the page, its offset and its memory are
aligned. Direct writes that lengthen a file wait for each other in ext4, so one arm allocates the
file's blocks before. "cold" reads come after ``posix_fadvise(DONTNEED)``, "warm" ones after a read
of the file. The arms take turns. Beside the rate stands the CPU time of the process per GB, and the
part of the file that is in the page cache afterwards.

A virtual machine's disk may be cached by its host, where nothing here can forget it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from vllm_graft.base.markdown import table
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.files import Files
from vllm_graft.hicache.storage.record import HEADER_BYTES, encode_header, verify

ALIGNMENT = 4096
"""Bytes to which O_DIRECT aligns offsets, lengths and memory: enough for every common disk."""

SYNC_BYTES = 64 << 20
"""The store's default of ``sync_bytes``."""

NAMESPACE = bytes(16)


class Arm(NamedTuple):
    """A way to the disk.

    Attributes:
        name: its name in the table.
        flags: flags of ``open`` beside those for reading and writing.
        header_bytes: bytes that a record's header takes in the file.
        allocates: whether the file gets its blocks before the first write.
    """

    name: str
    flags: int
    header_bytes: int
    allocates: bool = False


ARMS = (
    Arm("buffered", 0, HEADER_BYTES),
    Arm("direct", os.O_DIRECT, ALIGNMENT),
    Arm("direct, allocated", os.O_DIRECT, ALIGNMENT, allocates=True),
)


class Measured(NamedTuple):
    """One pass over all pages.

    Attributes:
        rate: GB/s of pages.
        cpu: seconds of CPU time of this process per GB, in the kernel too.
    """

    rate: float
    cpu: float


class Pages:
    """A file of records, and a pass over it with several threads.

    Args:
        path: the file, which is created.
        arm: how it is opened.
        page_bytes: bytes per page, a multiple of :data:`ALIGNMENT`.
        count: number of pages.
        threads: number of threads, each with one call at a time.
    """

    def __init__(self, path: Path, arm: Arm, page_bytes: int, count: int, threads: int) -> None:
        self.arm, self.page_bytes, self.count = arm, page_bytes, count
        self._files, self._threads = Files(), threads
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | arm.flags, 0o600)
        if arm.allocates:
            os.posix_fallocate(self._fd, 0, self.file_bytes)
        # Memory of mmap is aligned; the host pool's is too.
        self._memory = [mmap.mmap(-1, ALIGNMENT + page_bytes) for _ in range(threads)]
        content = random.Random(17).randbytes(page_bytes)
        for memory in self._memory:
            memory[ALIGNMENT:] = content
        self._keys = [PageKey(number.to_bytes(32, "big"), 0) for number in range(count)]

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.count * (self.arm.header_bytes + self.page_bytes)

    def write(self) -> Measured:
        """Write all pages in order, and make them durable."""
        every = max(1, SYNC_BYTES // self.page_bytes)

        def one(number: int, memory: memoryview) -> None:
            page = memory[ALIGNMENT:]
            header = encode_header(NAMESPACE, self._keys[number], page)
            start = ALIGNMENT - self.arm.header_bytes
            memory[start : start + HEADER_BYTES] = header
            self._files.write(self._fd, [memory[start:]], self._offset(number))
            if (number + 1) % every == 0:
                os.fdatasync(self._fd)

        return self._all(range(self.count), one, lambda: os.fdatasync(self._fd))

    def read(self) -> Measured:
        """Read and check all pages in random order."""

        def one(number: int, memory: memoryview) -> None:
            start = ALIGNMENT - self.arm.header_bytes
            done = self._files.read(self._fd, [memory[start:]], self._offset(number))
            header = bytes(memory[start : start + HEADER_BYTES])
            whole = done == ALIGNMENT - start + self.page_bytes
            if not whole or not verify(header, memory[ALIGNMENT:], NAMESPACE, self._keys[number]):
                raise RuntimeError(f"page {number} was read wrongly through {self.arm.name}")

        numbers = list(range(self.count))
        random.Random(5).shuffle(numbers)
        return self._all(numbers, one)

    def forget(self) -> None:
        """Drop the file from the page cache."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def cached(self) -> float:
        """The part of the file that is in the page cache."""
        size = self.file_bytes
        with mmap.mmap(self._fd, size) as view:
            pages = -(-size // mmap.PAGESIZE)
            found = (ctypes.c_ubyte * pages)()
            anchor = ctypes.c_char.from_buffer(view)
            address = ctypes.c_void_p(ctypes.addressof(anchor))
            if ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), found):
                raise OSError("mincore refused")
            del anchor
            return sum(value & 1 for value in found) / pages

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _offset(self, number: int) -> int:
        return number * (self.arm.header_bytes + self.page_bytes)

    def _all(
        self,
        numbers: Sequence[int],
        one: Callable[[int, memoryview], None],
        end: Callable[[], None] = lambda: None,
    ) -> Measured:
        def run(thread: int) -> None:
            with memoryview(self._memory[thread]) as memory:
                for number in numbers[thread :: self._threads]:
                    one(number, memory)

        cpu, begin = _cpu_seconds(), time.perf_counter()
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(run, range(self._threads)))
        end()
        seconds, gigabytes = time.perf_counter() - begin, self.count * self.page_bytes / 1e9
        return Measured(gigabytes / seconds, (_cpu_seconds() - cpu) / gigabytes)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(
    folder: Path, page_bytes: int, threads: int, total: int, rounds: int
) -> list[dict[str, object]]:
    """Measure the arms, in turns; a row per arm and kind of pass, with medians."""
    found: dict[tuple[str, str], list[Measured]] = {}
    cached: dict[tuple[str, str], float] = {}
    count = max(threads, total // page_bytes)
    for turn in range(rounds):
        for arm in ARMS if turn % 2 == 0 else ARMS[::-1]:
            with tempfile.TemporaryDirectory(dir=folder) as inside:
                pages = Pages(Path(inside) / "pages", arm, page_bytes, count, threads)
                try:
                    for kind in ("write", "read, cold", "read, warm"):
                        if kind == "read, cold":
                            pages.forget()
                        call = pages.write if kind == "write" else pages.read
                        found.setdefault((kind, arm.name), []).append(call())
                        cached[kind, arm.name] = pages.cached()
                finally:
                    pages.close()
    return [
        {
            "page": page_bytes,
            "threads": threads,
            "pass": kind,
            "arm": arm,
            "GB/s": round(statistics.median(each.rate for each in runs), 2),
            "CPU s per GB": round(statistics.median(each.cpu for each in runs), 2),
            "cached after": round(cached[kind, arm], 2),
        }
        for (kind, arm), runs in sorted(found.items())
    ]


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--page-bytes", type=int, nargs="+", default=[128 << 10, 2 << 20])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--bytes", type=int, default=1 << 30, help="bytes of pages per file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if any(size <= 0 or size % ALIGNMENT for size in given.page_bytes):
        parser.error(f"--page-bytes: give multiples of {ALIGNMENT}")
    rows = [
        row
        for size in given.page_bytes
        for threads in given.threads
        for row in measure(given.folder, size, threads, given.bytes, given.rounds)
    ]
    lines = [[str(value) for value in row.values()] for row in rows]
    print(json.dumps(rows, indent=2) if given.json else table(list(rows[0]), lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A process that writes pages from several threads until it is killed.

:func:`started` runs it with a directory, the first page's number and a seed. With a seed other than
0 it also kills itself, by an injected fault, when some part of a write is done. It prints
``ready``, and then the number of each page that :meth:`flush` has reported as durable.
"""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support.host_cache.faults import Faults, FaultyFiles
from vllm_graft.hicache.storage.backend import StorageBackend
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.testing.contracts.cache_contracts import NAMESPACE, page_key, page_of

PAGE_BYTES = 500_000
THREADS = 3
OPTIONS = {"max_bytes": "96MiB", "segment_bytes": "8MiB", "sync_bytes": "4MiB"}


def open_store(path: Path) -> SegmentsBackend:
    """Open the store, with the options of these tests."""
    return SegmentsBackend(NAMESPACE, {"path": path, **OPTIONS})


def started(path: Path, first: int, seed: int, **options: Any) -> "subprocess.Popen[str]":
    """Start the process, and return it once its store is open."""
    command = [sys.executable, "-m", __name__, str(path), str(first), str(seed)]
    root = Path(__file__).parents[3]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, **options)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def write(store: StorageBackend, first: int, thread: int) -> None:
    """Write every third page from ``first`` on, and flush now and then."""
    number = first + thread
    while True:
        key = page_key(number)
        kept = store.write(key, memoryview(page_of(key, PAGE_BYTES)))
        if number % 7 == thread and kept and store.flush():
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()
        if number % 11 == 0:
            store.remove(page_key(number - 5 * THREADS))
        number += THREADS


def main() -> None:
    path, first, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = open_store(path)
    if seed:
        store.files = FaultyFiles(Faults(0.02, seed, ["killed"]))
    threads = [
        threading.Thread(target=write, args=(store, first, number)) for number in range(THREADS)
    ]
    print("ready", flush=True)
    for thread in threads:
        thread.start()


if __name__ == "__main__":
    main()

"""Threads that read pages from storage into host slots, and write pages behind the requests."""

import enum
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vllm_graft.base.log import logger
from vllm_graft.hicache.host.index import Page
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.guarded import guarded
from vllm_graft.hicache.storage.tier.prefetch_operation import PrefetchOperation

FLUSH_SECONDS = 1.0
"""About the most seconds for which a written page stays unflushed."""

Job = TypeVar("Job")
Done = TypeVar("Done")


class JobQueue(ABC, Generic[Job, Done]):
    """Jobs that wait, run and have ended. Its threads do not delay the end of the process.
    Attributes of subclasses have to be set before ``__init__`` starts the threads."""

    def __init__(self, name: str, threads: int) -> None:
        self._queue: deque[Job] = deque()
        self._finished: list[Done] = []
        self._busy = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"graft-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def take_finished(self) -> list[Done]:
        """The results of jobs that have ended since the last call. No thread uses them any more."""
        with self._changed:
            finished, self._finished = self._finished, []
            return finished

    @abstractmethod
    def _run(self, job: Job) -> Done:
        """Carry out a job; it runs on a thread of the queue."""

    def _join(self, seconds: float) -> bool:
        """End the threads after queued jobs; False if one still runs after ``seconds``."""
        end = time.monotonic() + seconds
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                job = self._queue.popleft()
                self._busy += 1
            done = self._run(job)
            with self._changed:
                self._busy -= 1
                self._finished.append(done)
                self._changed.notify_all()


Parts = tuple[tuple[PageKey, memoryview], ...]
"""The parts of a page of host memory, one for each shard: the key in the store, and the bytes."""


@dataclass(eq=False)
class Load:
    """The read of one page for operations that wait for it, with the key's index in each.
    ``status`` is None before the read, and if the load was cancelled before a thread began it."""

    page: Page
    parts: Parts
    waiters: list[tuple[PrefetchOperation, int]] = field(default_factory=list)
    status: ReadStatus | None = None


class Loader(JobQueue[Load, Load]):
    """Reads pages from ``backend``. Each submitted load finishes exactly once."""

    def __init__(self, backend: StorageBackend, threads: int) -> None:
        self._backend = guarded(backend)
        super().__init__("prefetch", threads)

    def submit(self, *loads: Load) -> None:
        with self._changed:
            self._queue.extend(loads)
            self._changed.notify_all()

    def cancel(self, load: Load) -> None:
        """Finish a load without a read, unless a thread has begun it and will finish it."""
        with self._changed:
            if load in self._queue:
                self._queue.remove(load)
                self._finished.append(load)

    def close(self, timeout: float) -> bool:
        """Finish all queued loads without a read, wait for the others, and end the threads. Returns
        False if a read has not ended after ``timeout`` seconds. It still writes to its slot."""
        with self._changed:
            self._finished.extend(self._queue)
            self._queue.clear()
        return self._join(timeout)

    def _run(self, load: Load) -> Load:
        for key, buffer in load.parts:
            load.status = self._backend.read(key, buffer)
            if load.status is not ReadStatus.HIT:
                break
        return load


Write = tuple[Page, Parts]
"""A page of host memory to write."""


class Outcome(enum.Enum):
    """The result of a write."""

    KEPT = "kept"
    """The store keeps the parts of all shards."""
    FAILED = "failed"
    """The medium failed, or the store cannot keep such a page."""
    DECLINED = "declined"
    """There was no room for the page, because other processes have claimed it."""
    DROPPED = "dropped"
    """The cache was reset while the write was waiting."""


class WriteBehind(JobQueue[Write, tuple[Page, Outcome]]):
    """A bounded queue of writes; more than ``capacity`` that wait are declined."""

    def __init__(self, backend: StorageBackend, threads: int, capacity: int) -> None:
        self._backend = guarded(backend)
        self._capacity = capacity
        self._last_flush = time.monotonic()
        self.failed_flushes = 0
        super().__init__("write", threads)

    def __len__(self) -> int:
        with self._changed:
            return len(self._queue) + self._busy

    def submit(self, write: Write) -> bool:
        with self._changed:
            if self._closed or len(self._queue) >= self._capacity:
                return False
            self._queue.append(write)
            self._changed.notify_all()
            return True

    def drop(self) -> None:
        """Drop all waiting writes. Writes that a thread has begun go on."""
        with self._changed:
            self._finished += [(page, Outcome.DROPPED) for page, _ in self._queue]
            self._queue.clear()

    def wait_idle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)

    def close(self, timeout: float) -> bool:
        """Carry out waiting writes for at most ``timeout`` seconds, and end the threads. Returns
        False if a write has not ended by then."""
        end = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._busy, timeout)
            if self._queue:
                logger.warning(
                    "host KV cache: %d pages were not written before the end", len(self._queue)
                )
                self._queue.clear()
            self._closed = True
        return self._join(max(0.1, end - time.monotonic()))

    def _run(self, write: Write) -> tuple[Page, Outcome]:
        page, parts = write
        if all(self._backend.write(key, part) for key, part in parts):
            outcome = Outcome.KEPT
        else:
            outcome = Outcome.DECLINED if self._backend.is_full else Outcome.FAILED
        self._flush_if_due()
        return page, outcome

    def _flush_if_due(self) -> None:
        with self._changed:
            now = time.monotonic()
            if now - self._last_flush < FLUSH_SECONDS:
                return
            self._last_flush = now
        if not self._backend.flush():
            # Unflushed pages may be lost in a crash; then reads miss them.
            with self._changed:
                self.failed_flushes += 1

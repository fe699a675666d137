"""Write-behind: threads write pages to storage while the requests that made them go on."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass

from vllm_graft.base.log import logger
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import StorageBackend
from vllm_graft.hicache.storage.guarded import guarded
from vllm_graft.hicache.storage.tier.job_queue import JobQueue

FLUSH_SECONDS = 1.0
"""About the most seconds for which a written page stays unflushed."""


@dataclass(frozen=True)
class Write:
    """A page to write.

    Attributes:
        tag: number by which the caller knows the write.
        parts: key and bytes of each shard's part of the page.
    """

    tag: int
    parts: tuple[tuple[PageKey, memoryview], ...]


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


@dataclass(frozen=True)
class Written:
    """A write that has ended."""

    tag: int
    outcome: Outcome


class WriteBehind(JobQueue[Write, Written]):
    """A bounded queue of writes; more than ``capacity`` that wait are declined.

    Attributes:
        failed_flushes: number of flushes that failed.
    """

    def __init__(self, backend: StorageBackend, threads: int, capacity: int) -> None:
        self._backend = guarded(backend)
        self._capacity = capacity
        self._last_flush = time.monotonic()
        self.failed_flushes = 0
        super().__init__("write", threads)

    def __len__(self) -> int:
        """Number of writes that have not ended."""
        with self._changed:
            return len(self._queue) + self._busy

    def submit(self, write: Write) -> bool:
        """Queue a write; False if the queue is full or closed."""
        with self._changed:
            if self._closed or len(self._queue) >= self._capacity:
                return False
            self._queue.append(write)
            self._changed.notify_all()
            return True

    def drop(self) -> None:
        """Drop all waiting writes. Writes that a thread has begun go on."""
        with self._changed:
            self._finished += [Written(write.tag, Outcome.DROPPED) for write in self._queue]
            self._queue.clear()

    def wait_idle(self) -> None:
        """Wait until no thread is writing."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)

    def close(self, timeout: float) -> bool:
        """Carry out waiting writes for at most ``timeout`` seconds, and end the threads.

        Returns:
            False if a write has not ended by then.
        """
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

    def _run(self, write: Write) -> Written:
        if all(self._backend.write(key, page) for key, page in write.parts):
            outcome = Outcome.KEPT
        else:
            outcome = Outcome.DECLINED if self._backend.is_full else Outcome.FAILED
        self._flush_if_due()
        return Written(write.tag, outcome)

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

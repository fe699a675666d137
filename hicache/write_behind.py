"""Writes pages to storage on threads, behind the requests that made them."""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_graft.hicache.storage import PageKey, StorageBackend
from vllm_graft.hicache.threads import joined, started
from vllm_graft.log import logger

FLUSH_SECONDS = 1.0
"""What was written stays unflushed for about so long at most."""


@dataclass(frozen=True)
class Write:
    """A page to write: ``parts`` are its keys and bytes on each shard."""

    tag: int
    parts: tuple[tuple[PageKey, memoryview], ...]


class Outcome(enum.Enum):
    """What became of a write; a page of several shards is kept only with all of them."""

    KEPT = "kept"
    FAILED = "failed"
    """The medium failed, or the store keeps no such page."""
    DECLINED = "declined"
    """There was no room for it, as other processes have that."""
    DROPPED = "dropped"
    """It waited when everything was to be forgotten."""


@dataclass(frozen=True)
class Written:
    """A write that has ended."""

    tag: int
    outcome: Outcome


class WriteBehind:
    """A bounded queue before a storage backend.

    Args:
        backend: where pages go.
        threads: at least 1.
        capacity: writes that may wait; more are declined.
    """

    def __init__(self, backend: StorageBackend, threads: int, capacity: int) -> None:
        self._backend = backend
        self._capacity = capacity
        self._queue: deque[Write] = deque()
        self._finished: list[Written] = []
        self._busy = 0
        self._closed = False
        self._last_flush = time.monotonic()
        self._changed = threading.Condition()
        self.failed_flushes = 0
        """Flushes that the backend refused, or that raised."""
        self._threads = started(threads, "write", self._run)

    def __len__(self) -> int:
        """Writes that have not ended."""
        with self._changed:
            return len(self._queue) + self._busy

    def submit(self, write: Write) -> bool:
        """Queue a write; False if the queue is full or closed."""
        with self._changed:
            if self._closed or len(self._queue) >= self._capacity:
                return False
            self._queue.append(write)
            self._changed.notify()
            return True

    def take_finished(self) -> Sequence[Written]:
        """Writes that have ended since the last call, those that were dropped among them."""
        with self._changed:
            finished, self._finished = self._finished, []
            return finished

    def drop(self) -> None:
        """Drop what waits; what is being written goes on."""
        with self._changed:
            self._finished += [Written(write.tag, Outcome.DROPPED) for write in self._queue]
            self._queue.clear()

    def wait_idle(self) -> None:
        """Block until no thread is writing."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)

    def close(self, timeout: float) -> bool:
        """Write what waits, for ``timeout`` seconds at most, and end the threads.

        Returns:
            False if a write had not ended by then.
        """
        end = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._busy, timeout)
            self._closed = True
            if self._queue:
                logger.warning(
                    "host KV cache: %d pages were not written before the end", len(self._queue)
                )
                self._queue.clear()
            self._changed.notify_all()
        return joined(self._threads, max(0.1, end - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                write = self._queue.popleft()
                self._busy += 1
            outcome = self._write(write)
            self._flush_if_due()
            with self._changed:
                self._busy -= 1
                self._finished.append(Written(write.tag, outcome))
                self._changed.notify_all()

    def _write(self, write: Write) -> Outcome:
        try:
            if all(self._backend.write(key, page) for key, page in write.parts):
                return Outcome.KEPT
            return Outcome.DECLINED if self._backend.full else Outcome.FAILED
        except Exception:
            # A third party's backend: its exceptions must not end the thread.
            logger.exception("A storage backend raised in write(); the page is not kept.")
            return Outcome.FAILED

    def _flush_if_due(self) -> None:
        with self._changed:
            now = time.monotonic()
            if now - self._last_flush < FLUSH_SECONDS:
                return
            self._last_flush = now
        try:
            done = self._backend.flush()
        except Exception:
            # As in _write(). What was not flushed may be gone after a crash, and is then missed.
            logger.exception("A storage backend raised in flush().")
            done = False
        if not done:
            with self._changed:
                self.failed_flushes += 1

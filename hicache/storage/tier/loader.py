"""Threads that read single pages from storage into host slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.guarded import guarded
from vllm_graft.hicache.storage.tier.job_queue import JobQueue
from vllm_graft.hicache.storage.tier.prefetch_operation import PrefetchOperation


@dataclass(frozen=True)
class Slot:
    """Room for one page in host memory.

    Attributes:
        index: number by which the allocator knows the slot.
        buffer: writable and contiguous, with as many bytes as the page.
    """

    index: int
    buffer: memoryview


@dataclass(eq=False)
class Load:
    """The read of one page.

    Attributes:
        waiters: the operations that want the page, with the key's index in each.
        status: result of the read. None before it, and if the load was cancelled before a thread
            began it.
    """

    key: PageKey
    slot: Slot
    waiters: list[tuple[PrefetchOperation, int]] = field(default_factory=list)
    status: ReadStatus | None = None


class Loader(JobQueue[Load, Load]):
    """Reads pages from ``backend``. Each submitted load finishes exactly once."""

    def __init__(self, backend: StorageBackend, threads: int) -> None:
        self._backend = guarded(backend)
        super().__init__("prefetch", threads)

    def contained(self, keys: Sequence[PageKey]) -> list[PageKey]:
        """The keys before the first one that the backend's index lacks."""
        for index, there in enumerate(self._backend.contains(keys)):
            if not there:
                return list(keys[:index])
        return list(keys)

    def submit(self, *loads: Load) -> None:
        """Queue loads."""
        with self._changed:
            self._queue.extend(loads)
            self._changed.notify_all()

    def cancel(self, load: Load) -> None:
        """Finish a load without a read, unless a thread has begun it and will finish it."""
        with self._changed:
            if load in self._queue:
                self._queue.remove(load)
                self._finished.append(load)

    def wait_finished(self, timeout: float) -> None:
        """Wait until a load has finished, but at most ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished, timeout)

    def close(self, timeout: float) -> bool:
        """Finish all queued loads without a read, wait for the others, and end the threads.

        Returns:
            False if a read has not ended after ``timeout`` seconds. It still writes to its slot.
        """
        with self._changed:
            self._finished.extend(self._queue)
            self._queue.clear()
        return self._join(timeout)

    def _run(self, load: Load) -> Load:
        load.status = self._backend.read(load.key, load.slot.buffer)
        return load

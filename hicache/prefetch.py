"""Prefetch: pages go from storage into host slots while a request still waits for its turn.

One thread, the scheduler's, owns the slots: it calls :meth:`Prefetcher.start`,
:meth:`Prefetcher.poll` and :meth:`Prefetcher.close`, and the allocator is called inside these
only. I/O threads do nothing but fill buffers. So a page is published or its slot released exactly
once, whatever a cancel races with, and no slot is given away while a thread writes to it.
:meth:`PrefetchOperation.cancel` may be called from any thread.

Requests that want the same page share one load (single flight), and none waits for another's:
each goes by its own policy and deadline.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_graft.hicache.prefetch_load import Load, Loader, Slot
from vllm_graft.hicache.prefetch_operation import PrefetchOperation, PrefetchPolicy
from vllm_graft.hicache.storage import Counters, PageKey, ReadStatus, StorageBackend

__all__ = ["PrefetchOperation", "PrefetchPolicy", "Prefetcher", "Slot", "SlotAllocator"]


class SlotAllocator(Protocol):
    """The host pool, as the prefetcher sees it. Called by the owner's thread only."""

    def has(self, key: PageKey) -> bool:
        """Whether ``key`` is there, and waits for other parts of its page: it is not read again."""

    def allocate(self, key: PageKey) -> Slot | None:
        """A slot to load ``key`` into, which nobody else uses until one of the calls below.

        None: there is no room, or the page need not be loaded; the operation ends before it.
        """

    def publish(self, key: PageKey, slot: Slot) -> None:
        """``slot`` holds the checked page of ``key``; it belongs to the pool from here on."""

    def release(self, key: PageKey, slot: Slot) -> None:
        """``slot`` is given back; its bytes mean nothing."""


class Prefetcher:
    """Runs prefetch operations with a pool of I/O threads and a budget.

    Args:
        backend: where pages come from.
        allocator: gives and takes slots.
        threads: I/O threads, at least 1.
        budget_bytes: bytes of slots that may be loading at once, over all operations; a single
            page larger than it loads alone.
        clock: seconds, monotonic; tests pass their own.
    """

    def __init__(
        self,
        backend: StorageBackend,
        allocator: SlotAllocator,
        *,
        threads: int = 4,
        budget_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counters()
        self._allocator = allocator
        self._budget = budget_bytes
        self._clock = clock
        self._loader = Loader(backend, threads)
        self._loads: dict[PageKey, Load] = {}
        self._bytes = 0
        self._active: list[PrefetchOperation] = []
        self._waiting: deque[tuple[PrefetchOperation, int]] = deque()
        self._owner = threading.RLock()
        self._closed = False

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of the slots that are held by loads now."""
        return self._bytes

    def start(
        self,
        request_id: str,
        keys: Sequence[PageKey],
        policy: PrefetchPolicy = PrefetchPolicy.BEST_EFFORT,
        timeout: float | None = None,
    ) -> PrefetchOperation:
        """Begin to load ``keys`` in this order, as far as they are in the store's index.

        Loading stops at the first key that is not there: pages behind it can't be used.

        Args:
            request_id: who wants them.
            keys: the request's pages that are not in host memory; order by block, then pool.
            policy: how long the request is willing to wait.
            timeout: seconds from now; only, and always, with :attr:`PrefetchPolicy.TIMEOUT`.
        """
        if (timeout is not None) != (policy is PrefetchPolicy.TIMEOUT):
            raise ValueError(f"timeout={timeout} does not go with policy {policy.value!r}")
        deadline = None if timeout is None else self._clock() + timeout
        with self._owner:
            found = [] if self._closed else self._loader.contained(keys)
            operation = PrefetchOperation(request_id, found, policy, deadline, self._clock)
            self._active.append(operation)
            self._waiting.extend((operation, index) for index in range(len(found)))
            self._admit()
        return operation

    def poll(self) -> list[PrefetchOperation]:
        """Take in what the threads finished, begin what now fits, and end what is due.

        Returns:
            The operations that ended since the last call, each once. Never blocks on I/O.
        """
        with self._owner:
            for operation in self._active:
                operation.expire()
            self._abandon()
            for load in self._loader.take_finished():
                self._settle(load)
            self._admit()
            ended = [operation for operation in self._active if operation.ended]
            self._active = [operation for operation in self._active if not operation.ended]
            return ended

    def wait(self, operation: PrefetchOperation, timeout: float) -> bool:
        """Poll until ``operation`` has ended; False if ``timeout`` seconds went by first."""
        end = time.monotonic() + timeout
        while not operation.ended:
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._loader.wait_finished(min(left, 0.05))
            ended = self.poll()
            # Left for the owner's next poll, which reports each operation once.
            self._active.extend(ended)
        return True

    def close(self, timeout: float = 30.0) -> bool:
        """Cancel everything, wait for the reads that run, give all memory back. Idempotent.

        Returns:
            False if a read had not ended after ``timeout`` seconds: its slot is not given back.
        """
        with self._owner:
            self._closed = True
            for operation in self._active:
                operation.cancel()
            self._abandon()
        ended = self._loader.close(timeout)
        with self._owner:
            for load in self._loader.take_finished():
                self._settle(load)
            self._active.clear()
            self._waiting.clear()
        return ended

    def _admit(self) -> None:
        """Give slots to waiting keys in order of arrival, within the budget."""
        while self._waiting:
            operation, index = self._waiting[0]
            if operation.ended or index >= operation.limit:
                self._waiting.popleft()
                continue
            key = operation.keys[index]
            load = self._loads.get(key)
            if load is None:
                if self._allocator.has(key):
                    self.counters.add("shared")
                    self._waiting.popleft()
                    operation.resolve(index, ReadStatus.HIT)
                    continue
                if self._bytes >= self._budget:
                    return
                load = self._begin(key)
                if load is None:
                    self.counters.add("no_slot")
                    operation.resolve(index, ReadStatus.MISS)
                    continue
            else:
                self.counters.add("shared")
            self._waiting.popleft()
            load.waiters.append((operation, index))

    def _begin(self, key: PageKey) -> Load | None:
        slot = self._allocator.allocate(key)
        if slot is None:
            return None
        load = Load(key, slot)
        self._loads[key] = load
        self._bytes += slot.buffer.nbytes
        self._loader.submit(load)
        return load

    def _abandon(self) -> None:
        """Cancel loads that nobody wants any more."""
        for load in list(self._loads.values()):
            if not any(operation.wants(index) for operation, index in load.waiters):
                self._loader.cancel(load)

    def _settle(self, load: Load) -> None:
        """Publish or release the slot of a load that no thread touches any more."""
        del self._loads[load.key]
        self._bytes -= load.slot.buffer.nbytes
        wanted = any(operation.wants(index) for operation, index in load.waiters)
        if load.status is ReadStatus.HIT and wanted:
            self.counters.add("published")
            self.counters.add("published_bytes", load.slot.buffer.nbytes)
            self._allocator.publish(load.key, load.slot)
        else:
            self.counters.add("released")
            self._allocator.release(load.key, load.slot)
        status = load.status or ReadStatus.MISS
        self.counters.add(status.value if wanted else "cancelled")
        for operation, index in load.waiters:
            operation.resolve(index, status)

"""The prefetcher loads pages from storage into host slots while requests wait to be scheduled.

The scheduler's thread owns the index. Only it calls :meth:`Prefetcher.start`,
:meth:`Prefetcher.poll` and :meth:`Prefetcher.close`, and only these change the index. I/O threads
only fill buffers. So each slot is offered or given back exactly once, whatever happens at the same
time, and never while a thread writes to it.

Requests that want the same page share one load. Each request still waits only as long as its own
policy and deadline say."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from vllm_graft.base.metric import Counters
from vllm_graft.hicache.host.index import HostIndex, Page
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.tier.io_threads import Load, Loader, Parts
from vllm_graft.hicache.storage.tier.prefetch_operation import PrefetchOperation

MOST_LOADS = 256
"""Most loads in flight. More would not be read sooner, as threads are few. But each costs the
owner's thread some time, when it begins and at every poll."""


class Prefetcher:
    """Runs prefetch operations with I/O threads and a budget of bytes. All operations together have
    at most ``budget_bytes`` of slots in flight; a larger page is loaded alone. ``parts`` gives the
    parts of a page, and ``clock`` monotonic seconds."""

    def __init__(
        self, backend: StorageBackend, index: HostIndex, parts: Callable[[Page], Parts], *,
        threads: int = 4, budget_bytes: int = 1 << 30, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.counters = Counters()
        self._index, self._parts = index, parts
        self._budget, self._clock = budget_bytes, clock
        self._loader = Loader(backend, threads)
        self._loads: dict[PageKey, Load] = {}
        self.bytes_in_flight = 0
        self._active: list[PrefetchOperation] = []
        self._waiting: deque[tuple[PrefetchOperation, int]] = deque()
        self._owner = threading.RLock()
        self._closed = False

    def start(
        self, request_id: str, keys: Sequence[PageKey], timeout: float | None = None
    ) -> PrefetchOperation:
        """Begin to load ``keys``, which are ordered by block, then by pool. Loading stops at the
        first page that storage does not have, because the pages after it are useless. The request
        waits ``timeout`` seconds from now, or not at all."""
        deadline = None if timeout is None else self._clock() + timeout
        with self._owner:
            keys = () if self._closed else keys
            operation = PrefetchOperation(request_id, keys, deadline, self._clock)
            self._active.append(operation)
            self._waiting.extend((operation, index) for index in range(len(keys)))
            self._admit()
        return operation

    def is_loading(self, key: PageKey) -> bool:
        return key in self._loads

    def poll(self) -> list[PrefetchOperation]:
        """Take in finished loads, begin loads that fit into the budget, and apply deadlines. It
        never waits for I/O. Each operation that has ended is returned once."""
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

    def close(self, timeout: float = 30.0) -> bool:
        """Cancel all operations, wait for reads in flight, and give back all slots. Returns False
        if a read has not ended after ``timeout`` seconds. Its slot is not given back."""
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
        """Begin to load waiting keys in order of arrival, within the budget."""
        begun: list[Load] = []
        while self._waiting:
            operation, index = self._waiting[0]
            if operation.ended or index >= operation.limit:
                self._waiting.popleft()
                continue
            key = operation.keys[index]
            load = self._loads.get(key)
            if load is None:
                if self._index.has(key):
                    self.counters.add("shared")
                    self._waiting.popleft()
                    operation.resolve(index, ReadStatus.HIT)
                    continue
                if self.bytes_in_flight >= self._budget or len(self._loads) >= MOST_LOADS:
                    break
                load = self._begin(key)
                if load is None:
                    self.counters.add("no_slot")
                    operation.resolve(index, ReadStatus.MISS)
                    continue
                begun.append(load)
            else:
                self.counters.add("shared")
            self._waiting.popleft()
            load.waiters.append((operation, index))
        if begun:
            self._loader.submit(*begun)

    def _begin(self, key: PageKey) -> Load | None:
        """Begin a load; None if there is no room, or another copy is bringing the page."""
        pages = self._index.reserve([key], from_storage=True)
        if not pages:
            return None
        load = self._loads[key] = Load(pages[0], self._parts(pages[0]))
        self.bytes_in_flight += _bytes(load)
        return load

    def _abandon(self) -> None:
        """Cancel loads that no operation wants any more."""
        for load in list(self._loads.values()):
            if not any(operation.wants(index) for operation, index in load.waiters):
                self._loader.cancel(load)

    def _settle(self, load: Load) -> None:
        """Offer the page of a finished load, or give its slot back."""
        del self._loads[load.page.key]
        self.bytes_in_flight -= _bytes(load)
        wanted = any(operation.wants(index) for operation, index in load.waiters)
        if load.status is ReadStatus.HIT and wanted:
            self.counters.add("published")
            self.counters.add("published_bytes", _bytes(load))
            self._index.commit([load.page])
        else:
            self.counters.add("released")
            self._index.forget([load.page])
            self._index.release([load.page])
        status = load.status or ReadStatus.MISS
        self.counters.add(status.value if wanted else "cancelled")
        for operation, index in load.waiters:
            operation.resolve(index, status)


def _bytes(load: Load) -> int:
    return sum(buffer.nbytes for _, buffer in load.parts)

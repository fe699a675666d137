"""Storage below the host pool: what is read before it is asked for, and written after it was made.

The scheduler's thread owns slots and index; threads of the prefetcher and of the write-behind only
fill and read buffers. A page read from storage is offered once its checksum was compared in host
memory, and not before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_graft.hicache.config import PrefetchConfig
from vllm_graft.hicache.geometry import Geometry
from vllm_graft.hicache.host_index import HostIndex, Page
from vllm_graft.hicache.host_pool import HostPool
from vllm_graft.hicache.prefetch import Prefetcher, PrefetchOperation, PrefetchPolicy, Slot
from vllm_graft.hicache.storage import PageKey, ReadStatus, StorageBackend
from vllm_graft.hicache.threads import joined, started
from vllm_graft.hicache.write_behind import Outcome, Write, WriteBehind
from vllm_graft.log import logger

DRAIN_SECONDS = 30.0
"""Longest that a shutdown waits for writes, and for reads."""

RESET_SECONDS = 10.0
"""Longest that a reset waits for storage. It goes on behind, and until its end storage is off."""


@dataclass
class _Incoming:
    """A page on its way from storage.

    Attributes:
        page: its slot.
        reading: how many shards threads fill.
        came: shards that are there: nobody may write to them any more.
        failed: whether one will not come.
    """

    page: Page
    reading: int = 0
    came: set[int] = field(default_factory=set)
    failed: bool = False


class StorageTier:
    """A storage backend, its threads, and the pages that they hold.

    Args:
        backend: open; closed by :meth:`close`.
        pool: the host's memory.
        index: which page is in which slot.
        geometry: sizes that all processes agree on.
        options: of prefetching.
    """

    def __init__(
        self,
        backend: StorageBackend,
        pool: HostPool,
        index: HostIndex,
        geometry: Geometry,
        options: PrefetchConfig,
    ) -> None:
        self.backend = backend
        self.written = 0
        self.declined = 0
        """Pages that were not written: too many waited, or the store has no room for them."""
        self.dropped = 0
        """Pages that waited to be written when everything was to be forgotten."""
        self._failed_writes = 0
        self._pool = pool
        self._index = index
        self._shards = geometry.shape.num_shards
        self._page_bytes = {group.index: group.page_bytes for group in geometry.groups}
        self._options = options
        budget = int(options.max_share * geometry.shape.num_bytes)
        self._prefetcher = Prefetcher(
            backend, self, threads=options.threads, budget_bytes=max(1, budget)
        )
        capacity = max(1, geometry.shape.num_slots // 4)
        self._writer = WriteBehind(backend, options.threads, capacity)
        self._writing: dict[int, Page] = {}
        self._next_write = 0
        self._incoming: dict[PageKey, _Incoming] = {}
        self._reset: threading.Thread | None = None
        self._cleared = True

    @property
    def errors(self) -> int:
        """Reads, writes and flushes that failed."""
        reads = self._prefetcher.counters.snapshot()
        failed_reads = sum(
            reads.get(status.value, 0) for status in (ReadStatus.ERROR, ReadStatus.CORRUPT)
        )
        return failed_reads + self._failed_writes + self._writer.failed_flushes

    @property
    def resetting(self) -> bool:
        """Whether storage still forgets its pages: until then nothing is read or written."""
        return self._reset is not None and self._reset.is_alive()

    @property
    def write_queue(self) -> int:
        """Pages that wait to be written."""
        return len(self._writer)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that are being read."""
        return self._prefetcher.bytes_in_flight

    def is_incoming(self, key: PageKey) -> bool:
        """Whether a page is being read."""
        return key in self._incoming

    def contains(self, keys: Sequence[PageKey]) -> dict[PageKey, bool]:
        """Whether storage has all shards of each page; its index alone is asked."""
        if self.resetting:
            return dict.fromkeys(keys, False)
        parts = [self._part(key, shard) for key in keys for shard in range(self._shards)]
        found = self.backend.contains(parts)
        count = self._shards
        return {
            key: all(found[number * count : (number + 1) * count])
            for number, key in enumerate(keys)
        }

    def prefetch(self, request_id: str, keys: Sequence[PageKey], tokens: int) -> PrefetchOperation:
        """Begin to read pages, in the order in which they are useful.

        Args:
            request_id: who wants them.
            keys: pages that host memory does not have.
            tokens: that they stand for; the deadline grows with them.
        """
        parts = [self._part(key, shard) for key in keys for shard in range(self._shards)]
        options = self._options
        if options.policy == "best_effort":
            return self._prefetcher.start(request_id, parts, PrefetchPolicy.BEST_EFFORT)
        # Storage that hangs must not hold a request for ever, whatever the policy.
        seconds = options.max_seconds
        if options.policy == "timeout":
            seconds = options.base_seconds + options.seconds_per_1k_tokens * tokens / 1000
        return self._prefetcher.start(
            request_id, parts, PrefetchPolicy.TIMEOUT, min(seconds, options.max_seconds)
        )

    def store(self, pages: Iterable[Page]) -> None:
        """Write pages that have come to host memory."""
        off = self.resetting
        for page in pages:
            if page.indexed and not page.volatile:
                if off:
                    self.declined += 1
                else:
                    self._write(page)

    def poll(self) -> list[PrefetchOperation]:
        """Take in what the threads have finished. Never blocks on I/O."""
        for written in self._writer.take_finished():
            self._index.release([self._writing.pop(written.tag)])
            self.written += written.outcome is Outcome.KEPT
            self.declined += written.outcome is Outcome.DECLINED
            self.dropped += written.outcome is Outcome.DROPPED
            self._failed_writes += written.outcome is Outcome.FAILED
        ended = self._prefetcher.poll()
        # A prefetch that was cut between two shards of a page leaves one that nobody completes.
        for whole in [key for key, page in self._incoming.items() if not page.reading]:
            self._drop(whole)
        return ended

    def reset(self) -> bool:
        """Forget every page of the namespace, on the medium too.

        Storage that hangs is waited for :data:`RESET_SECONDS`; the answer is then False, and
        storage stays off until it has forgotten its pages after all.
        """
        self._writer.drop()
        self.poll()
        if not self.resetting:
            self._cleared = False
            (self._reset,) = started(1, "reset", self._clear)
        if self._reset is None or not joined([self._reset], RESET_SECONDS):
            logger.warning(
                "host KV cache: storage has not forgotten its pages in %.0f s; it is not used "
                "until it has.",
                RESET_SECONDS,
            )
            return False
        self.poll()
        return self._cleared

    def close(self) -> None:
        """Write what waits, and give everything back."""
        ended = self._prefetcher.close(DRAIN_SECONDS)
        ended &= self._writer.close(DRAIN_SECONDS)
        self.poll()
        if ended and not self.resetting:
            try:
                self.backend.close()
            except Exception:
                logger.exception("A storage backend raised in close().")
        else:
            logger.warning("host KV cache: storage hangs; it is left as it is at shutdown.")
        self._pool.close()

    def _clear(self) -> None:
        """On a thread: once nothing that was before is being written, forget all of it."""
        self._writer.wait_idle()
        try:
            self._cleared = self.backend.clear()
        except Exception:
            logger.exception("A storage backend raised in clear(); it may still have pages.")

    # The host pool, as the prefetcher sees it

    def has(self, key: PageKey) -> bool:
        """Whether a shard has come, and others have not."""
        whole, shard = self._whole(key)
        incoming = self._incoming.get(whole)
        return incoming is not None and shard in incoming.came

    def allocate(self, key: PageKey) -> Slot | None:
        """A slot's part for one shard; the slot is shared by the shards of a page."""
        whole, shard = self._whole(key)
        incoming = self._incoming.get(whole)
        if incoming is None:
            pages = None
            if self._index.get(whole) is None:
                pages = self._index.reserve([whole], from_storage=True)
            if pages is None:
                return None
            incoming = self._incoming[whole] = _Incoming(pages[0])
        incoming.reading += 1
        size = self._page_bytes[whole.pool]
        return Slot(incoming.page.slot, self._pool.page(shard, incoming.page.slot, size))

    def publish(self, key: PageKey, slot: Slot) -> None:
        """A shard has come; with the last of them the page is offered."""
        self._arrived(key, failed=False)

    def release(self, key: PageKey, slot: Slot) -> None:
        """A shard will not come: the page is not offered."""
        self._arrived(key, failed=True)

    def _arrived(self, key: PageKey, failed: bool) -> None:
        whole, shard = self._whole(key)
        incoming = self._incoming[whole]
        incoming.reading -= 1
        if failed:
            incoming.failed = True
        else:
            incoming.came.add(shard)
        if len(incoming.came) == self._shards:
            del self._incoming[whole]
            self._index.commit([incoming.page])
        elif incoming.failed and not incoming.reading:
            self._drop(whole)

    def _drop(self, whole: PageKey) -> None:
        """Give up a page of which a part will not come."""
        incoming = self._incoming.pop(whole)
        self._index.forget([incoming.page])
        self._index.release([incoming.page])

    def _write(self, page: Page) -> None:
        size = self._page_bytes[page.key.pool]
        parts = tuple(
            (self._part(page.key, shard), self._pool.page(shard, page.slot, size))
            for shard in range(self._shards)
        )
        tag, self._next_write = self._next_write, self._next_write + 1
        self._index.hold([page])
        self._writing[tag] = page
        if not self._writer.submit(Write(tag, parts)):
            self._index.release([self._writing.pop(tag)])
            self.declined += 1

    def _part(self, key: PageKey, shard: int) -> PageKey:
        """The key of one shard's bytes."""
        if self._shards == 1:
            return key
        return PageKey(key.hash, key.pool * self._shards + shard)

    def _whole(self, key: PageKey) -> tuple[PageKey, int]:
        """The page and the shard of a part."""
        if self._shards == 1:
            return key, 0
        return PageKey(key.hash, key.pool // self._shards), key.pool % self._shards

"""The storage tier prefetches pages from a store into host memory, and writes new pages behind."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_graft.base.log import logger
from vllm_graft.hicache.config.cache_config import PrefetchConfig
from vllm_graft.hicache.host.index import HostIndex, Page
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.guarded import guarded
from vllm_graft.hicache.storage.tier.io_threads import Outcome, Slot, Write, WriteBehind
from vllm_graft.hicache.storage.tier.prefetch_operation import PrefetchOperation
from vllm_graft.hicache.storage.tier.prefetcher import Prefetcher

DRAIN_SECONDS = 30.0
"""Most seconds that a shutdown waits for writes, and again for reads."""

RESET_SECONDS = 10.0
"""Most seconds that a reset waits for storage. After that, storage stays off until it has reset."""


@dataclass
class _Incoming:
    """A page of which shards are ``reading``, ``came``, or at least one ``failed``."""

    page: Page
    reading: int = 0
    came: set[int] = field(default_factory=set)
    failed: bool = False


class StorageTier:
    """An open store, the threads that read from it and write to it, and the pages that they hold.

    The scheduler's thread owns slots and index. Threads of the prefetcher and of the write-behind
    only fill and read buffers. A page is offered only after its checksum was compared in host
    memory.
    """

    def __init__(
        self,
        backend: StorageBackend,
        pool: HostPool,
        index: HostIndex,
        geometry: Geometry,
        options: PrefetchConfig,
    ) -> None:
        self.backend = guarded(backend)
        self.written = 0
        self.declined = 0
        """Pages that were not written because too many waited, or the store had no room."""
        self.dropped = 0
        """Pages whose write was waiting when the cache was reset."""
        self._failed_writes = 0
        self._pool = pool
        self._index = index
        self._shards = geometry.shape.num_shards
        self._page_bytes = {group.index: group.page_bytes for group in geometry.groups}
        self._options = options
        budget = int(options.max_share * geometry.shape.num_bytes)
        self._prefetcher = Prefetcher(
            self.backend, self, threads=options.threads, budget_bytes=max(1, budget)
        )
        capacity = max(1, geometry.shape.num_slots // 4)
        self._writer = WriteBehind(self.backend, options.threads, capacity)
        self._incoming: dict[PageKey, _Incoming] = {}
        self._reset: threading.Thread | None = None
        self._cleared = True

    @property
    def errors(self) -> int:
        """Number of lookups, reads, writes and flushes that failed."""
        reads = self._prefetcher.counters.snapshot()
        failed = sum(reads.get(each.value, 0) for each in (ReadStatus.ERROR, ReadStatus.CORRUPT))
        failed += self._failed_writes + self._writer.failed_flushes
        return failed + self.backend.failed_lookups

    @property
    def resetting(self) -> bool:
        """Whether a reset of storage is in progress. Meanwhile no page is read or written."""
        return self._reset is not None and self._reset.is_alive()

    @property
    def write_queue(self) -> int:
        return len(self._writer)

    @property
    def bytes_in_flight(self) -> int:
        return self._prefetcher.bytes_in_flight

    def is_incoming(self, key: PageKey) -> bool:
        return key in self._incoming

    def contains(self, keys: Sequence[PageKey]) -> dict[PageKey, bool]:
        """Whether storage has all shards of each page, as its index says."""
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
        """Begin to read pages, in the order in which they are useful, into host memory.

        The deadline grows with the number of their tokens.
        """
        parts = [self._part(key, shard) for key in keys for shard in range(self._shards)]
        options = self._options
        if options.policy == "best_effort":
            return self._prefetcher.start(request_id, parts)
        # Storage may hang. So even "wait_complete" has a deadline.
        seconds = options.max_seconds
        if options.policy == "timeout":
            seconds = options.base_seconds + options.seconds_per_1k_tokens * tokens / 1000
        return self._prefetcher.start(request_id, parts, min(seconds, options.max_seconds))

    def store(self, pages: Iterable[Page]) -> None:
        """Begin to write new pages of host memory to storage."""
        off = self.resetting
        for page in pages:
            if page.indexed and not page.volatile:
                if off:
                    self.declined += 1
                else:
                    self._write(page)

    def poll(self) -> list[PrefetchOperation]:
        """Take in finished reads and writes; return the prefetches that have newly ended."""
        for page, outcome in self._writer.take_finished():
            self._index.release([page])
            self.written += outcome is Outcome.KEPT
            self.declined += outcome is Outcome.DECLINED
            self.dropped += outcome is Outcome.DROPPED
            self._failed_writes += outcome is Outcome.FAILED
        ended = self._prefetcher.poll()
        # If a prefetch ended between two shards of a page, no one will read the other shards.
        for whole in [key for key, found in self._incoming.items() if not found.reading]:
            self._drop(whole)
        return ended

    def reset(self) -> bool:
        """Forget every page of the namespace, on the medium too; return whether that is done."""
        self._writer.drop()
        self.poll()
        if not self.resetting:
            self._cleared = False
            self._reset = threading.Thread(target=self._clear, name="graft-reset", daemon=True)
            self._reset.start()
        if self._reset is not None:
            self._reset.join(RESET_SECONDS)
        if self.resetting:
            logger.warning(
                "host KV cache: storage has not forgotten its pages in %.0f s; it is not used "
                "until it has.",
                RESET_SECONDS,
            )
            return False
        self.poll()
        return self._cleared

    def close(self) -> None:
        """Finish waiting writes, close the store, and unmap the host memory."""
        ended = self._prefetcher.close(DRAIN_SECONDS)
        ended &= self._writer.close(DRAIN_SECONDS)
        self.poll()
        if ended and not self.resetting:
            self.backend.close()
        else:
            logger.warning("host KV cache: storage hangs; it is left as it is at shutdown.")
        self._pool.close()

    def _clear(self) -> None:
        """Clear the store after running writes have ended."""
        self._writer.wait_idle()
        self._cleared = self.backend.clear()

    # The host pool, as the prefetcher sees it

    def has(self, key: PageKey) -> bool:
        """Whether a shard was read: others of its page may not be, or the page was offered."""
        whole, shard = self._whole(key)
        incoming = self._incoming.get(whole)
        return self._index.has(whole) if incoming is None else shard in incoming.came

    def allocate(self, key: PageKey) -> Slot | None:
        """Reserve one shard's part of a slot. All shards of a page use the same slot number."""
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
        """Note that a shard was read. The page is offered once all shards were."""
        self._arrived(key, failed=False)

    def release(self, key: PageKey, slot: Slot) -> None:
        """Note that the read of a shard failed. The page is not offered."""
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
        """Give up a page that cannot be completed."""
        incoming = self._incoming.pop(whole)
        self._index.forget([incoming.page])
        self._index.release([incoming.page])

    def _write(self, page: Page) -> None:
        size = self._page_bytes[page.key.pool]
        parts = tuple(
            (self._part(page.key, shard), self._pool.page(shard, page.slot, size))
            for shard in range(self._shards)
        )
        self._index.hold([page])
        if not self._writer.submit(Write(page, parts)):
            self._index.release([page])
            self.declined += 1

    def _part(self, key: PageKey, shard: int) -> PageKey:
        if self._shards == 1:
            return key
        return PageKey(key.hash, key.pool * self._shards + shard)

    def _whole(self, key: PageKey) -> tuple[PageKey, int]:
        """The key of the whole page, and the number of the shard, for the key of a part."""
        if self._shards == 1:
            return key, 0
        return PageKey(key.hash, key.pool // self._shards), key.pool % self._shards

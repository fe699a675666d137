"""The storage tier prefetches pages from a store into host memory, and writes new pages behind."""

import threading
from collections.abc import Iterable, Sequence

from vllm_graft.base.log import logger
from vllm_graft.hicache.config.cache_config import PrefetchConfig
from vllm_graft.hicache.host.index import HostIndex, Page
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.guarded import guarded
from vllm_graft.hicache.storage.tier.io_threads import Outcome, Parts, WriteBehind
from vllm_graft.hicache.storage.tier.prefetch_operation import PrefetchOperation
from vllm_graft.hicache.storage.tier.prefetcher import Prefetcher

DRAIN_SECONDS = 30.0
"""Most seconds that a shutdown waits for writes, and again for reads."""

RESET_SECONDS = 10.0
"""Most seconds that a reset waits for storage. After that, storage stays off until it has reset."""


class StorageTier:
    """An open store, the threads that read from it and write to it, and the pages that they hold.
    The scheduler's thread owns slots and index. Threads of prefetcher and write-behind only fill
    and read buffers. A page is offered only after its checksum was compared in host memory."""

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
        self._pool, self._index = pool, index
        self._shards = geometry.shape.num_shards
        self._page_bytes = {group.index: group.page_bytes for group in geometry.groups}
        self._options = options
        budget = int(options.max_share * geometry.shape.num_bytes)
        self._prefetcher = Prefetcher(
            self.backend, index, self._parts, threads=options.threads, budget_bytes=max(1, budget)
        )
        capacity = max(1, geometry.shape.num_slots // 4)
        self._writer = WriteBehind(self.backend, options.threads, capacity)
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
        return self._prefetcher.is_loading(key)

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
        """Begin to read pages, in the order in which they are useful, into host memory. The
        deadline grows with the number of their tokens."""
        options = self._options
        if options.policy == "best_effort":
            return self._prefetcher.start(request_id, keys)
        # Storage may hang. So even "wait_complete" has a deadline.
        seconds = options.max_seconds
        if options.policy == "timeout":
            seconds = options.base_seconds + options.seconds_per_1k_tokens * tokens / 1000
        return self._prefetcher.start(request_id, keys, min(seconds, options.max_seconds))

    def store(self, pages: Iterable[Page]) -> None:
        wanted = [page.key for page in pages if page.indexed and not page.volatile]
        held = [] if self.resetting else self._index.hold(wanted)
        if held is None:
            # Another engine may have evicted some already.
            held = [page for key in wanted for page in self._index.hold([key]) or ()]
        self.declined += len(wanted) - len(held)
        for page in held:
            if not self._writer.submit((page, self._parts(page))):
                self._index.release([page])
                self.declined += 1

    def poll(self) -> list[PrefetchOperation]:
        """Take in finished reads and writes; return the prefetches that have newly ended."""
        for page, outcome in self._writer.take_finished():
            self._index.release([page])
            self.written += outcome is Outcome.KEPT
            self.declined += outcome is Outcome.DECLINED
            self.dropped += outcome is Outcome.DROPPED
            self._failed_writes += outcome is Outcome.FAILED
        return self._prefetcher.poll()

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
        self._index.close()
        self._pool.close()

    def _clear(self) -> None:
        """Clear the store after running writes have ended."""
        self._writer.wait_idle()
        self._cleared = self.backend.clear()

    def _parts(self, page: Page) -> Parts:
        size = self._page_bytes[page.key.pool]
        return tuple(
            (self._part(page.key, shard), self._pool.page(shard, page.slot, size))
            for shard in range(self._shards)
        )

    def _part(self, key: PageKey, shard: int) -> PageKey:
        return PageKey(key.hash, key.pool * self._shards + shard)

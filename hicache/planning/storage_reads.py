"""Decides which pages of a new request to read from storage, and how long it waits for them."""

import time

from vllm.v1.core.block_pool import BlockPool

from vllm_graft.hicache.host.index import HostIndex
from vllm_graft.hicache.messages.cache_stats import HiCacheStats
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.groups import HitPolicy, longest_hit
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.planning.cost import CostModel
from vllm_graft.hicache.planning.request_state import RequestState
from vllm_graft.hicache.storage.tier.prefetch_operation import PrefetchOperation
from vllm_graft.hicache.storage.tier.storage_tier import StorageTier

IDLE_SECONDS = 0.001
"""Seconds that an engine pauses if it only waits for storage, because vLLM would spin."""

PROBE_EVERY = 32
"""One of so many hits is read although it does not pay, to notice if storage became faster."""

ASKED = 256
"""Pages of a group that storage is asked about at once. Raised, a new request whose pages it does
not have takes longer."""


class StorageReads:
    """The prefetches of waiting requests."""

    def __init__(
        self,
        tier: StorageTier,
        geometry: Geometry,
        index: HostIndex,
        cost: CostModel,
        stats: HiCacheStats,
    ) -> None:
        self.tier = tier
        self.device: BlockPool | None = None
        self._groups = geometry.groups
        self._page_bytes = {group.index: group.page_bytes for group in geometry.groups}
        self._index, self._cost, self._stats = index, cost, stats
        self._running: dict[str, tuple[PrefetchOperation, float, int]] = {}
        self._seen = (0, 0, 0, 0)
        self._unread = 0

    def arrived(self, state: RequestState, limit: int) -> None:
        """Begin to read pages that a new request can use and that host memory does not have.
        ``limit`` is the most tokens that its prefix may have."""
        local = self._on_device(state)
        keys, tokens = self._wanted(state, local, limit)
        if not keys:
            return
        size = sum(self._page_bytes[key.pool] for key in keys)
        if not self._cost.worth_reading(tokens, size, self.tier.bytes_in_flight):
            self._unread += 1
            if self._unread % PROBE_EVERY:
                self._stats.add("recomputed")
                return
        request_id = state.request.request_id
        operation = self.tier.prefetch(request_id, keys, tokens)
        self._running[request_id] = (operation, time.perf_counter(), size)

    def may_run(self, state: RequestState, others: bool) -> bool:
        """Whether a request need not wait for its prefetch; then reads that have not begun end.
        ``others`` says whether other requests run meanwhile."""
        entry = self._running.get(state.request.request_id)
        if entry is None:
            return True
        self.poll()
        operation, begun, size = entry
        if not operation.may_run():
            if not others:
                time.sleep(IDLE_SECONDS)
            return False
        if operation.timed_out:
            # The learned rate drops. Otherwise each request would wait again for hanging storage.
            came = size * operation.loaded / len(operation.keys)
            self._cost.disk.at_most(came, time.perf_counter() - begun)
            self._stats.add("prefetch_timeouts")
        self.finished(state.request.request_id)
        return True

    def finished(self, request_id: str) -> None:
        """Cancel the prefetch of a request that no longer waits."""
        entry = self._running.pop(request_id, None)
        if entry is not None:
            entry[0].cancel()

    def poll(self) -> None:
        """Take in and count pages that were read from or written to storage."""
        for operation in self.tier.poll():
            entry = self._running.get(operation.request_id)
            if entry is None or operation is not entry[0]:
                continue
            self._stats.add("prefetched_pages", operation.loaded)
            if operation.keys and operation.loaded == len(operation.keys):
                self._cost.disk.observe(entry[2], time.perf_counter() - entry[1])
        tier = self.tier
        counted = (tier.written, tier.errors, tier.declined, tier.dropped)
        names = ("written_pages", "storage_errors", "declined_writes", "dropped_writes")
        for name, count, seen in zip(names, counted, self._seen):
            self._stats.add(name, count - seen)
        self._seen = counted

    def cancel(self) -> None:
        for request_id in list(self._running):
            self.finished(request_id)

    def reset(self) -> bool:
        """Cancel all prefetches, and forget every page in storage."""
        self.cancel()
        return self.tier.reset()

    def _wanted(self, state: RequestState, local: int, limit: int) -> tuple[list[PageKey], int]:
        """The pages to read for a request, and the number of their tokens. They complete the
        longest prefix of at most ``limit`` tokens that the device, with ``local`` tokens, host
        memory and storage have together."""
        stored: dict[PageKey, bool] = {}

        def there(group: int, block: int) -> bool:
            known = state.keys[group]
            if block >= len(known):
                return False
            key = known[block]
            if self._on_host(key):
                return True
            if key not in stored:
                # Stores look up lists. They are not asked about all of a long prompt, whose first
                # page they may not have.
                first = block // ASKED * ASKED
                some = known[first : first + ASKED]
                stored.update(
                    self.tier.contains([each for each in some if not self._on_host(each)])
                )
            return stored[key]

        end = longest_hit(self._groups, local, limit, there)
        pages = [
            (block * group.block_tokens, state.keys[group.index][block])
            for group in self._groups
            for block in group.needed(local, end)
        ]
        # By position, then by pool, so that the loaded pages are a prefix in every pool.
        pages.sort(key=lambda page: (page[0], page[1].pool))
        wanted = [key for _, key in pages if key in stored]
        tokens = len({start for start, key in pages if key in stored}) * min(
            group.block_tokens for group in self._groups
        )
        return wanted, tokens

    def _on_host(self, key: PageKey) -> bool:
        """Whether host memory has a page, and no other request is still reading it. The load of
        such a page is shared, but each request has its own deadline."""
        return self._index.get(key) is not None and not self.tier.is_incoming(key)

    def _on_device(self, state: RequestState) -> int:
        """Number of leading tokens whose KV is on the device; 0 if a group needs not all pages."""
        full = [group for group in self._groups if group.hit_policy is HitPolicy.ALL_PAGES]
        if self.device is None or len(full) != len(self._groups):
            return 0
        tokens = []
        for group in full:
            step, blocks = group.hashes_per_block, 0
            for block_hash in state.request.block_hashes[step - 1 :: step]:
                if self.device.get_cached_block(block_hash, [group.index]) is None:
                    break
                blocks += 1
            tokens.append(blocks * group.block_tokens)
        return min(tokens)

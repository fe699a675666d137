"""Plans loads: which pages of an accepted offer are copied to which blocks, and when."""

from collections.abc import Collection, Iterator, Sequence

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_graft.base.log import warning_once
from vllm_graft.hicache.host.controller import HybridCacheController
from vllm_graft.hicache.host.index import HostIndex, Page
from vllm_graft.hicache.messages.cache_stats import HiCacheStats
from vllm_graft.hicache.messages.step_metadata import HiCacheMetadata
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.planning.request_state import RequestState
from vllm_graft.hicache.planning.store_planner import NULL_BLOCK


class LoadPlanner:
    """Issues the loads of offers that vLLM has accepted since the last step."""

    def __init__(
        self,
        geometry: Geometry,
        index: HostIndex,
        controller: HybridCacheController,
        stats: HiCacheStats,
    ) -> None:
        self._geometry, self._index = geometry, index
        self._controller, self._stats = controller, stats
        self._next = HiCacheMetadata()
        self.step_tokens = 0
        """Number of tokens that the next step computes for requests that it begins with."""
        self._queued: dict[int, int] = {}
        """Bytes of the loads, by their jobs, that a load of the next step would come behind."""

    @property
    def queued_bytes(self) -> int:
        """Bytes of loads that are before a load of the next step on the link. Those within steps
        are not among them once their step was built, although the ranks have not reported them: a
        load begins when the work of earlier steps has ended, and that waits for its own loads."""
        jobs = self._controller.jobs
        self._queued = {job: size for job, size in self._queued.items() if job in jobs}
        return sum(self._queued.values())

    def issue(self, state: RequestState, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Issue the load of the state's offer, of which vLLM has accepted ``external`` tokens.
        ``block_ids`` are the blocks that vLLM has allocated for it, by the group's number."""
        chosen = state.chosen
        if chosen is None:
            warning_once("host KV cache: vLLM accepted tokens that were not offered")
            self._fail_load(state, {block for ids in block_ids for block in ids})
            return
        end = chosen.start + external
        source = self._to_load(state, block_ids, chosen.start, end)
        operation = self._controller.load(source, state.request.request_id)
        if operation is None:
            self._fail_load(state, {block for _, block in source} if chosen.layerwise else set())
            return
        self._queued[operation.ids[0]] = sum(
            len(transfer) * self._controller.groups[transfer.group].page_bytes
            for transfer in operation.transfers
        )
        self._index.touch(key for key, _ in reversed(source))
        if chosen.layerwise:
            self._next.sync_loads.append(operation)
            self.step_tokens += state.request.num_tokens - end
        else:
            self._next.async_loads.append(operation)
        pages = self._controller.jobs[operation.ids[0]].pages
        self._count_load(state, pages, external, chosen.layerwise)

    def blocks(self) -> Iterator[int]:
        """Yield the device blocks that the next step's loads write."""
        for operation in self._next.sync_loads + self._next.async_loads:
            for transfer in operation.transfers:
                yield from transfer.device_indices

    def take(self) -> HiCacheMetadata:
        """Return a step's work for the ranks: the loads, also those that are impossible."""
        work, self._next = self._next, HiCacheMetadata()
        self.step_tokens = 0
        for operation in work.sync_loads:
            self._queued.pop(operation.ids[0], None)
        return work

    def _to_load(
        self, state: RequestState, block_ids: Sequence[Sequence[int]], start: int, end: int
    ) -> list[tuple[PageKey, int]]:
        """The pages to load, with their blocks. Null blocks are left out."""
        source: list[tuple[PageKey, int]] = []
        for group in self._geometry.groups:
            numbers = group.needed(start, end)
            part = slice(numbers.start, numbers.stop)
            pairs = zip(state.keys[group.index][part], block_ids[group.index][part], strict=True)
            source += [pair for pair in pairs if pair[1] != NULL_BLOCK]
        return source

    def _count_load(
        self, state: RequestState, pages: Sequence[Page], tokens: int, layerwise: bool
    ) -> None:
        stored = [page for page in pages if page.from_storage]
        for page in stored:
            # Later hits on the page count as hits in host memory.
            page.from_storage = False
        self._stats.add("hit_pages_of_others", sum(page.of_other for page in pages))
        from_storage = tokens * len(stored) // max(1, len(pages))
        split = {CacheHitSource.DISK: from_storage, CacheHitSource.HOST: tokens - from_storage}
        state.sources = {source: count for source, count in split.items() if count}
        self._stats.add("hit_tokens_storage", from_storage)
        self._stats.add("hit_tokens_host", tokens - from_storage)
        self._stats.add("loads_layerwise" if layerwise else "loads_async")

    def _fail_load(self, state: RequestState, blocks: Collection[int]) -> None:
        """Let the ranks report an impossible load as failed, because vLLM expects it from them.
        ``blocks`` are those that the next step reads, none if the request waits outside of
        steps."""
        state.suspect = True
        if blocks:
            self._next.failed_blocks += blocks
        else:
            self._next.failed_loads.append(state.request.request_id)
        self._stats.add("failed_loads")

"""The scheduler's side of the host KV cache: what to load, what to store, what became of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from vllm_graft.base.log import warning_once
from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.hicache.host.controller import HybridCacheController
from vllm_graft.hicache.host.index import HostIndex
from vllm_graft.hicache.messages.cache_stats import HiCacheStats
from vllm_graft.hicache.messages.operation import CacheOperation
from vllm_graft.hicache.messages.step_metadata import HiCacheMetadata, HiCacheReport
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.groups import HitPolicy, alignment, longest_hit
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.planning.cost import CostModel, Hit, LoadMode
from vllm_graft.hicache.planning.recency import Recency
from vllm_graft.hicache.planning.request_state import Chosen, RequestState
from vllm_graft.hicache.planning.step_clock import StepTimes
from vllm_graft.hicache.planning.storage_reads import Prefetches
from vllm_graft.hicache.planning.store_planner import NULL_BLOCK, StorePlanner, handed_out
from vllm_graft.hicache.storage.tier.storage_tier import StorageTier

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class HiCacheScheduler:
    """Decides; see :class:`HybridCacheController` for how pages and jobs are kept.

    Args:
        config: the connector's.
        geometry: sizes that all processes agree on.
        index: the host pool's slots.
        speculative: whether drafts are verified: then the last known token's KV may change.
        tier: storage below the host pool, if any.
    """

    def __init__(
        self,
        config: HiCacheConfig,
        geometry: Geometry,
        index: HostIndex,
        speculative: bool,
        tier: StorageTier | None = None,
    ) -> None:
        self.config = config
        self.geometry = geometry
        self.index = index
        self.controller = HybridCacheController(geometry.groups, index, geometry.num_workers)
        self.cost = CostModel(**config.cost.model_dump())
        self.stats = HiCacheStats()
        self.prefetches = Prefetches(tier, geometry, index, self.cost, self.stats) if tier else None
        self._states: dict[str, RequestState] = {}
        self._stores = StorePlanner(config, geometry, self.controller, speculative)
        self._align = alignment(geometry.groups)
        self._loads: list[tuple[CacheOperation, bool]] = []
        self._failed_loads: list[str] = []
        self._failed_blocks: list[int] = []
        self._early_stores: list[CacheOperation] = []
        self._recency = Recency(geometry.groups, index)
        self._times = StepTimes()
        self._running = 0
        self._step_tokens = 0
        """That requests whose loads the next step reads have to compute in it."""

    # Requests

    def state_of(self, request: Request) -> RequestState:
        """What is remembered of a request, from now on if it is new."""
        state = self._states.get(request.request_id)
        if state is None:
            state = RequestState(request, self.geometry.groups)
            self._states[request.request_id] = state
            self._stores.arrived(state)
        else:
            state.update_keys()
        return state

    def arrived(self, request: Request) -> None:
        """A request has arrived, and will be scheduled later."""
        state = self.state_of(request)
        unread = request.skip_reading_prefix_cache or state.volatile
        if self.prefetches is not None and not unread:
            self.prefetches.arrived(state, self._limit(request))

    def bind(self, pool: BlockPool) -> None:
        """vLLM's pool of device blocks: what it has need not be read from storage."""
        if self.prefetches is not None:
            self.prefetches.device = pool

    def lookup(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond ``computed`` that can be loaded, and whether outside of steps.

        Changes nothing but what is remembered of the offer; vLLM may ask any number of times.
        """
        state = self.state_of(request)
        state.chosen = None
        # vLLM counts anew what is computed.
        state.suspect = False
        if request.skip_reading_prefix_cache or computed % self._align:
            return 0, False
        if self.prefetches is not None and not self.prefetches.may_run(state, bool(self._running)):
            return None, False
        end = self._longest(state, computed, self._limit(request))
        if end <= computed:
            return 0, False
        chosen = self._choose(state, computed, end)
        state.chosen = chosen
        if chosen is None:
            return 0, False
        return chosen.end - chosen.start, not chosen.layerwise

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """vLLM has accepted an offer of ``external`` tokens, and has blocks for them."""
        if not external:
            return
        state = self.state_of(request)
        chosen, block_ids = state.chosen, blocks.get_block_ids()
        if chosen is None:
            warning_once("host KV cache: vLLM accepted tokens that were not offered")
            self._fail_load(state, {block for ids in block_ids for block in ids})
            return
        end = chosen.start + external
        source = list(self._to_load(state, block_ids, chosen.start, end))
        operation = self.controller.load(source, request.request_id)
        if operation is None:
            self._fail_load(state, {block for _, block in source} if chosen.layerwise else set())
            return
        self.index.touch(key for key, _ in reversed(source))
        self._loads.append((operation, chosen.layerwise))
        if chosen.layerwise:
            self._step_tokens += request.num_tokens - end
        self._count_load(state, source, external, chosen.layerwise)

    def hit_sources(self, request: Request, external: int) -> dict[CacheHitSource, int]:
        """Where the tokens of the accepted offer come from; they add up to ``external``."""
        state = self._states.get(request.request_id)
        sources = state.sources if state is not None else {}
        return sources if sum(sources.values()) == external else {CacheHitSource.HOST: external}

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """A request has ended; its blocks are still as they were."""
        state = self._states.pop(request.request_id, None)
        if self.prefetches is not None:
            self.prefetches.finished(request.request_id)
        if state is None or state.suspect or self._load_pending(request.request_id):
            return
        if request.status is RequestStatus.FINISHED_ERROR:
            # A load has failed, ours or another connector's: the blocks may hold anything.
            return
        state.update_keys()
        # The last token that was sampled has no KV.
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        operation = self._stores.blocks(state, block_ids, tokens, flush=True)
        if operation is not None:
            self._early_stores.append(operation)
        self._recency.ended(state.keys, tokens)

    def _limit(self, request: Request) -> int:
        """Most tokens that a prefix of the request may have."""
        policies = {group.hit_policy for group in self.geometry.groups}
        if self.config.load == "async" and policies == {HitPolicy.ALL_PAGES}:
            # vLLM computes the last token again from the same blocks.
            return int(request.num_tokens)
        # A window or a state at the very end is of no use for the token before it, and a load
        # within a step has to leave that step a token.
        return int(request.num_tokens) - 1

    def _longest(self, state: RequestState, computed: int, limit: int) -> int:
        keys, has = state.keys, self.index.has

        def there(group: int, block: int) -> bool:
            known = keys[group]
            return block < len(known) and has(known[block])

        return longest_hit(self.geometry.groups, computed, limit, there)

    def _choose(self, state: RequestState, start: int, end: int) -> Chosen | None:
        """How to load a hit; None if it is better recomputed."""
        if self.config.load == "recompute":
            return None
        if self.config.load != "auto":
            return Chosen(start, end, self.config.load == "layerwise")
        hit = Hit(
            tokens=end - start,
            num_bytes=self._bytes(start, end),
            rest_tokens=state.request.num_tokens - end,
            others=self._running,
            queued_bytes=sum(
                self._operation_bytes(job.operation)
                for job in self.controller.jobs.values()
                if job.operation.request_ids
            ),
            step_tokens=self._step_tokens,
        )
        plan = self.cost.choose(hit)
        if plan.mode is LoadMode.RECOMPUTE:
            self.stats.add("recomputed")
            return None
        if plan.tokens < hit.tokens:
            end = self._longest(state, start, start + plan.tokens)
            if end <= start:
                return None
        return Chosen(start, end, plan.mode is LoadMode.LAYERWISE)

    def _bytes(self, start: int, end: int) -> int:
        return sum(
            len(group.needed(start, end)) * group.page_bytes for group in self.geometry.groups
        )

    def _operation_bytes(self, operation: CacheOperation) -> int:
        return sum(
            len(transfer) * self.controller.groups[transfer.group].page_bytes
            for transfer in operation.transfers
        )

    def _to_load(
        self, state: RequestState, block_ids: Sequence[Sequence[int]], start: int, end: int
    ) -> Iterator[tuple[PageKey, int]]:
        """Pages and the blocks that they go to. Blocks that vLLM does not keep are left out."""
        for group in self.geometry.groups:
            keys, blocks = state.keys[group.index], block_ids[group.index]
            for number in group.needed(start, end):
                if blocks[number] != NULL_BLOCK:
                    yield keys[number], blocks[number]

    def _count_load(
        self,
        state: RequestState,
        source: Sequence[tuple[PageKey, int]],
        tokens: int,
        layerwise: bool,
    ) -> None:
        pages = [self.index.get(key) for key, _ in source]
        stored = sum(page is not None and page.from_storage for page in pages)
        for page in pages:
            if page is not None:
                # From here on it is a page of host memory like any other.
                page.from_storage = False
        from_storage = tokens * stored // max(1, len(pages))
        split = {CacheHitSource.DISK: from_storage, CacheHitSource.HOST: tokens - from_storage}
        state.sources = {source: count for source, count in split.items() if count}
        self.stats.add("hit_tokens_storage", from_storage)
        self.stats.add("hit_tokens_host", tokens - from_storage)
        self.stats.add("loads_layerwise" if layerwise else "loads_async")

    def _fail_load(self, state: RequestState, blocks: Collection[int]) -> None:
        """The load cannot be made: the ranks report it as failed, which is vLLM's way to say so.

        Args:
            state: of the request.
            blocks: that its next step reads; none where it waits outside of steps.
        """
        state.suspect = True
        if blocks:
            self._failed_blocks += blocks
        else:
            self._failed_loads.append(state.request.request_id)
        self.stats.add("failed_loads")

    def _load_pending(self, request_id: str) -> bool:
        return any(request_id in job.operation.request_ids for job in self.controller.jobs.values())

    # Steps

    def build(self, output: SchedulerOutput) -> HiCacheMetadata:
        """The ranks' work for a step."""
        metadata = HiCacheMetadata(
            failed_loads=self._failed_loads, failed_blocks=self._failed_blocks
        )
        for operation, layerwise in self._loads:
            (metadata.sync_loads if layerwise else metadata.async_loads).append(operation)
        metadata.early_stores = self._surviving(output)
        metadata.fences = self._fences(output)
        metadata.stores = list(self._stores.step(output, self._states))
        self._loads, self._early_stores = [], []
        self._failed_loads, self._failed_blocks = [], []
        self._step_tokens = 0
        if self.prefetches is not None:
            self.prefetches.poll()
        self._running = len(output.num_scheduled_tokens)
        # A step that waits for loads tells nothing of the speed of prefill.
        tokens = 0 if metadata.sync_loads else output.total_num_scheduled_tokens
        if output.total_num_scheduled_tokens:
            metadata.step = self._times.begin(tokens)
        return metadata

    def report(self, output: KVConnectorOutput) -> None:
        """Take in what the ranks report after a step."""
        if output.invalid_block_ids:
            # A load within a step has failed, ours or another connector's below MultiConnector:
            # what steps computed from those blocks, and stored, is wrong.
            self.controller.drop_stores()
            for state in self._states.values():
                state.stored = dict.fromkeys(state.stored, 0)
        report = output.kv_connector_worker_meta
        if not isinstance(report, HiCacheReport):
            return
        for tokens, seconds in self._times.ended(report.steps):
            self._learn(tokens, seconds)
        finished = self.controller.report(report.done, report.failed)
        self._recency.poll()
        for way, moved in (("load", report.loads), ("store", report.stores)):
            self.stats.add(f"{way}_bytes", moved.bytes)
            self.stats.add(f"{way}_strided_bytes", moved.strided_bytes)
            self.stats.add(f"{way}_seconds", moved.seconds)
        self.stats.add("load_staged_bytes", report.loads.staged_bytes)
        self.cost.copied(report.loads.bytes, report.loads.seconds, load=True)
        self.cost.copied(report.stores.bytes, report.stores.seconds, load=False)
        if self.prefetches is not None:
            self.prefetches.tier.store(finished.stored)
        self.stats.add("failed_loads", finished.failed_loads)
        for request_id in finished.failed_requests:
            if request_id in self._states:
                self._states[request_id].suspect = True
        self.stats.add("failed_stores", finished.failed_stores)
        self.stats.add("unwaited_layers", report.unwaited_layers)

    @property
    def busy(self) -> bool:
        """Whether steps have to go on although no request runs."""
        return bool(self.controller.jobs or self._early_stores)

    def reset(self) -> bool:
        """Forget every page."""
        for operation in self._early_stores:
            self.controller.cancel(operation)
        self._early_stores = []
        self.controller.reset()
        self._stores.reset()
        for state in self._states.values():
            state.stored = dict.fromkeys(state.stored, 0)
        return self.prefetches is None or self.prefetches.reset()

    def close(self) -> None:
        """Stop what runs beside the scheduler."""
        if self.prefetches is not None:
            self.prefetches.tier.close()

    def take_stats(self) -> HiCacheStats | None:
        """What was counted since the last call; None if nothing."""
        if self.stats.is_empty():
            return None
        stats = HiCacheStats(data=dict(self.stats.data))
        self.stats.reset()
        stats.data["pages"] = len(self.index)
        stats.data["free_pages"] = self.index.num_free
        stats.data["jobs"] = len(self.controller.jobs)
        stats.data |= self.cost.learned()
        stats.data["evictions"], self.index.evictions = self.index.evictions, 0
        declined, self.controller.declined_stores = self.controller.declined_stores, 0
        stats.data["declined_stores"] = declined
        if self.prefetches is not None:
            stats.data["write_queue"] = self.prefetches.tier.write_queue
        return stats

    def _learn(self, tokens: int, seconds: float) -> None:
        """Take in how long a step of so many tokens took."""
        self.cost.computed(tokens, seconds)
        for group in self.geometry.groups:
            self.index.page_cost[group.index] = self.cost.seconds_to_compute(group.block_tokens)

    def _fences(self, output: SchedulerOutput) -> list[int]:
        """Stores that still read blocks which this step hands out."""
        if not self.controller.stores_in_flight:
            return []
        given = set(handed_out(output))
        for operation, _ in self._loads:
            for transfer in operation.transfers:
                given.update(transfer.device_indices)
        return sorted(self.controller.jobs_reading(given))

    def _surviving(self, output: SchedulerOutput) -> list[CacheOperation]:
        """Stores of freed blocks, without those that vLLM zeroes before it tells the ranks."""
        zeroed = set(output.new_block_ids_to_zero or ())
        kept = []
        for operation in self._early_stores:
            blocks = {b for transfer in operation.transfers for b in transfer.device_indices}
            if zeroed.isdisjoint(blocks):
                kept.append(operation)
            else:
                self.controller.cancel(operation)
        return kept

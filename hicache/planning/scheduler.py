"""The scheduler's side of the host KV cache: it plans loads and stores, and takes in reports."""

import os
from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from vllm_graft.base.log import warning_once
from vllm_graft.hicache.config.cache_config import HiCacheConfig, flag
from vllm_graft.hicache.host.controller import HybridCacheController
from vllm_graft.hicache.host.index import HostIndex
from vllm_graft.hicache.messages.cache_stats import HiCacheStats
from vllm_graft.hicache.messages.operation import CacheOperation
from vllm_graft.hicache.messages.step_metadata import HiCacheMetadata, HiCacheReport
from vllm_graft.hicache.pages.engine_core import Change
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.groups import HitPolicy, alignment, longest_hit
from vllm_graft.hicache.pages.page_key import SALT_BYTES, PageKey
from vllm_graft.hicache.planning.cost import CostModel, Hit, LoadMode, StepClock
from vllm_graft.hicache.planning.load_planner import LoadPlanner
from vllm_graft.hicache.planning.request_state import Chosen, Recency, RequestState
from vllm_graft.hicache.planning.storage_reads import StorageReads
from vllm_graft.hicache.planning.store_planner import StorePlanner, handed_out
from vllm_graft.hicache.storage.tier.storage_tier import StorageTier

LOOKED_UP = 256
"""Keys that a lookup has made at once. Raised, a prompt that nobody has sent takes longer."""


class HiCacheScheduler:
    """Decides which pages to load and to store. The controller keeps pages and jobs."""

    def __init__(
        self,
        config: HiCacheConfig,
        geometry: Geometry,
        index: HostIndex,
        speculative: bool,
        tier: StorageTier | None = None,
    ) -> None:
        self.config, self.geometry, self.index = config, geometry, index
        self.controller = HybridCacheController(geometry.groups, index, geometry.num_workers)
        self.cost = CostModel()
        self.stats = HiCacheStats()
        self.storage_reads = (
            StorageReads(tier, geometry, index, self.cost, self.stats) if tier else None
        )
        self._states: dict[str, RequestState] = {}
        # K/V of adapters is this engine's alone, as another one's may have other weights.
        self._salt, self._adapter_salt = b"", os.urandom(SALT_BYTES)
        self._loads = LoadPlanner(geometry, index, self.controller, self.stats)
        self._stores = StorePlanner(config, geometry, self.controller, speculative)
        self._align = alignment(geometry.groups)
        self._early_stores: list[CacheOperation] = []
        self._recency = Recency(geometry.groups, index)
        self._step_clock = StepClock()
        self._running = 0

    def state_of(self, request: Request) -> RequestState:
        """The state of a request, which is created if the request is new."""
        state = self._states.get(request.request_id)
        if state is None:
            state = RequestState(request, self.geometry.groups, self._salt_of(request))
            self._states[request.request_id] = state
            self._stores.arrived(state)
        return state

    def arrived(self, request: Request) -> None:
        """Take in a new request, which will be scheduled later, and begin to prefetch its pages."""
        state = self.state_of(request)
        unread = request.skip_reading_prefix_cache or state.volatile
        if self.storage_reads is not None and not unread:
            self.index.look()
            self.storage_reads.arrived(state, self._limit(request))

    def bind(self, pool: BlockPool) -> None:
        """Take vLLM's pool of device blocks. Its pages need not be read from storage."""
        if self.storage_reads is not None:
            self.storage_reads.device = pool

    def lookup(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Look up what can be loaded for a request. vLLM may call it any number of times. It
        changes only the offer in the request's state. Returns the number of tokens that can be
        loaded beyond the ``computed`` ones, None if the request should wait for its prefetch, and
        whether they are loaded outside of steps."""
        state = self.state_of(request)
        if state.outdated:
            # vLLM looks up requests whose K/V will be computed from the start.
            state.begin(self._salt_of(request))
        state.chosen = None
        state.computed = computed
        # vLLM counts computed tokens anew for each lookup.
        state.suspect = False
        if request.skip_reading_prefix_cache or computed % self._align:
            return 0, False
        reads = self.storage_reads
        if reads is not None and not reads.may_run(state, bool(self._running)):
            return None, False
        self.index.look()
        end = self._longest(state, computed, self._limit(request))
        if end <= computed:
            return 0, False
        chosen = self._choose(state, computed, end)
        if chosen is not None and not self.index.offer(state.needed(computed, chosen.end)):
            chosen = None
        state.chosen = chosen
        return (0, False) if chosen is None else (chosen.end - computed, not chosen.layerwise)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Issue the load of an offer of which vLLM has accepted ``external`` tokens. Without any,
        the next step computes the request as it is."""
        state = self.state_of(request)
        if external:
            self._loads.issue(state, blocks.get_block_ids(), external)
        else:
            # Of a request whose load has ended, vLLM knows the tokens. It was not looked up again.
            computed = request.num_computed_tokens or state.computed
            self._loads.step_tokens += request.num_tokens - computed

    def hit_sources(self, request: Request, external: int) -> dict[CacheHitSource, int]:
        """The number of tokens of the accepted offer from each source; the sum is ``external``."""
        state = self._states.get(request.request_id)
        sources = state.sources if state is not None else {}
        return sources if sum(sources.values()) == external else {CacheHitSource.HOST: external}

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Take in the end of a request, whose blocks are still intact."""
        state = self._states.pop(request.request_id, None)
        if self.storage_reads is not None:
            self.storage_reads.finished(request.request_id)
        if state is None or state.suspect or state.outdated:
            return
        jobs = self.controller.jobs.values()
        if any(request.request_id in job.operation.request_ids for job in jobs):
            return  # Its load is pending.
        if request.status is RequestStatus.FINISHED_ERROR:
            # A load of this or another connector has failed, so the blocks may be invalid.
            return
        # The last sampled token has no KV.
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        operation = self._stores.blocks(state, block_ids, tokens, flush=True)
        if operation is not None:
            self._early_stores.append(operation)
        self._recency.ended(state.keys, tokens)

    def _limit(self, request: Request) -> int:
        """Most tokens that a loaded prefix of the request may have."""
        policies = {group.hit_policy for group in self.geometry.groups}
        if self.config.load == "async" and policies == {HitPolicy.ALL_PAGES}:
            # vLLM can compute the last token again from the same blocks.
            return int(request.num_tokens)
        # One token has to remain. A load within a step must leave a token to compute. And a window
        # or a state at the very end is useless for computing the last token again.
        return int(request.num_tokens) - 1

    def _longest(self, state: RequestState, computed: int, limit: int) -> int:
        known: dict[int, list[PageKey]] = {group.index: [] for group in self.geometry.groups}

        def there(group: int, block: int) -> bool:
            if block >= len(known[group]):
                known[group] = state.keys[group].leading(block + LOOKED_UP)
            return block < len(known[group]) and self.index.has(known[group][block])

        return longest_hit(self.geometry.groups, computed, limit, there)

    def _choose(self, state: RequestState, start: int, end: int) -> Chosen | None:
        """Choose how to load a hit; None if it should be recomputed."""
        if self.config.load == "recompute":
            return None
        if self.config.load != "auto":
            return Chosen(start, end, self.config.load == "layerwise")
        hit = Hit(
            tokens=end - start,
            num_bytes=self._bytes(start, end),
            rest_tokens=state.request.num_tokens - end,
            others=self._running,
            queued_bytes=self._loads.queued_bytes,
            step_tokens=self._loads.step_tokens,
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

    def build(self, output: SchedulerOutput) -> HiCacheMetadata:
        self.index.end_offers()
        stores, fences = self._surviving(output), self._fences(output)
        metadata = self._loads.take()
        metadata.early_stores, metadata.fences = stores, fences
        metadata.stores = list(self._stores.step(output, self._states))
        self._early_stores = []
        if self.storage_reads is not None:
            self.storage_reads.poll()
        self._running = len(output.num_scheduled_tokens)
        # The time of a step that waits for loads does not measure prefill.
        tokens = 0 if metadata.sync_loads else output.total_num_scheduled_tokens
        if output.total_num_scheduled_tokens:
            metadata.step = self._step_clock.begin(tokens)
        return metadata

    def report(self, output: KVConnectorOutput) -> None:
        if output.invalid_block_ids:
            # A load within a step has failed, either ours or that of another connector below
            # MultiConnector. KV that steps computed from those blocks is wrong, so no store of it
            # may count.
            self.controller.drop_stores()
            for state in self._states.values():
                state.stored = dict.fromkeys(state.stored, 0)
        report = output.kv_connector_worker_meta
        if not isinstance(report, HiCacheReport):
            return
        for tokens, seconds in self._step_clock.ended(report.steps):
            self.cost.computed(tokens, seconds)
            for group in self.geometry.groups:
                page_cost = self.cost.seconds_to_compute(group.block_tokens)
                self.index.page_cost[group.index] = page_cost
        finished = self.controller.report(report.done, report.failed, report.unfit)
        if finished.unfit:
            self.stats.add("unfit_pages", finished.unfit)
            warning_once(
                "host KV cache: a page does not fit into its form on the host, and is computed "
                "again when it is needed. If the metric unfit_pages shows many, remove "
                f"{flag('host_dtype')}."
            )
        self._recency.poll()
        for direction, moved in (("load", report.loads), ("store", report.stores)):
            self.stats.add(f"{direction}_bytes", moved.bytes)
            self.stats.add(f"{direction}_strided_bytes", moved.strided_bytes)
            self.stats.add(f"{direction}_seconds", moved.seconds)
            self.cost.copied(moved.bytes, moved.seconds, load=direction == "load")
        self.stats.add("load_staged_bytes", report.loads.staged_bytes)
        if self.storage_reads is not None:
            self.storage_reads.tier.store(finished.stored)
        self.stats.add("failed_loads", finished.failed_loads)
        for request_id in finished.failed_requests:
            if request_id in self._states:
                self._states[request_id].suspect = True
        self.stats.add("failed_stores", finished.failed_stores)
        self.stats.add("unwaited_layers", report.unwaited_layers)

    @property
    def busy(self) -> bool:
        """Whether vLLM has to go on with steps although no request runs."""
        return bool(self.controller.jobs or self._early_stores)

    def reset(self) -> bool:
        """Forget every page, and store new ones where no other engine finds them. A cache is reset
        because its pages are no longer right, so the namespace may not be either."""
        self._forget()
        emptied = self.index.empty()
        return (self.storage_reads is None or self.storage_reads.reset()) and emptied

    def changed(self, change: Change) -> None:
        """Find no page of before the change any more; see :class:`Change`. Pages that are in
        storage already stay there, as they belong to the namespace's weights."""
        if change is Change.WEIGHTS:
            self._forget()
            if self.storage_reads is not None:
                self.storage_reads.cancel()
        elif change is Change.ADAPTER:
            self._adapter_salt = os.urandom(SALT_BYTES)
            for state in self._states.values():
                state.outdated |= state.volatile

    def _forget(self) -> None:
        """Forget the host's pages, and store no K/V that was computed until now."""
        self._salt = os.urandom(SALT_BYTES)
        for operation in self._early_stores:
            self.controller.cancel(operation)
        self._early_stores = []
        self.controller.reset()
        self._stores.reset()
        for state in self._states.values():
            state.outdated = True

    def _salt_of(self, request: Request) -> bytes:
        """The salt of a request's pages; that of an adapter changes with either."""
        return self._salt + (self._adapter_salt if request.lora_request is not None else b"")

    def close(self) -> None:
        if self.storage_reads is not None:
            self.storage_reads.tier.close()
        self.index.close()

    def take_stats(self) -> HiCacheStats | None:
        """Counters since the last call, and current gauges; None if nothing was counted."""
        if self.stats.is_empty():
            return None
        data = {
            **self.stats.data,
            "pages": len(self.index),
            "free_pages": self.index.num_free,
            "jobs": len(self.controller.jobs),
            **self.cost.learned(),
            **self.index.counts(),
            "declined_stores": self.controller.declined_stores,
        }
        self.stats.reset()
        self.controller.declined_stores = 0
        if self.storage_reads is not None:
            data["write_queue"] = self.storage_reads.tier.write_queue
        return HiCacheStats(data=data)

    def _fences(self, output: SchedulerOutput) -> list[int]:
        """Jobs of stores in flight that read blocks which this step gives to requests."""
        if not self.controller.stores_in_flight:
            return []
        given = {*handed_out(output), *self._loads.blocks()}
        return sorted(self.controller.jobs_reading(given))

    def _surviving(self, output: SchedulerOutput) -> list[CacheOperation]:
        """The stores of freed blocks that are still possible; the others are cancelled. vLLM zeroes
        their blocks before the ranks get this step's metadata."""
        zeroed = set(output.new_block_ids_to_zero or ())
        kept = []
        for operation in self._early_stores:
            blocks = {b for transfer in operation.transfers for b in transfer.device_indices}
            if zeroed.isdisjoint(blocks):
                kept.append(operation)
            else:
                self.controller.cancel(operation)
        return kept

"""Plans stores: which blocks of which requests are copied to the host, and when."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.hicache.host.controller import HybridCacheController
from vllm_graft.hicache.messages.operation import CacheOperation
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.planning.request_state import RequestState

NULL_BLOCK = 0
"""Id of vLLM's null block, which stands for a block that is not kept."""


class TouchCounter:
    """Counts requests for each page; beyond ``capacity`` keys the longest unused are forgotten."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[PageKey, int] = OrderedDict()

    def add(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1
            self._counts.move_to_end(key)
        while len(self._counts) > self._capacity:
            self._counts.popitem(last=False)

    def count(self, key: PageKey) -> int:
        return self._counts.get(key, 0)

    def clear(self) -> None:
        self._counts.clear()


class StorePlanner:
    """Plans stores as the option ``write_policy`` says. If drafts are verified (``speculative``),
    the KV of the last known token may change."""

    def __init__(
        self,
        config: HiCacheConfig,
        geometry: Geometry,
        controller: HybridCacheController,
        speculative: bool,
    ) -> None:
        self._config, self._geometry, self._controller = config, geometry, controller
        self._unstable_tokens = 1 if speculative else 0
        self._touches = TouchCounter(16 * geometry.shape.num_slots)

    def arrived(self, state: RequestState) -> None:
        if self._config.write_policy == "write_through_selective":
            for keys in state.keys.values():
                self._touches.add(keys)

    def reset(self) -> None:
        self._touches.clear()

    def step(
        self, output: SchedulerOutput, states: Mapping[str, RequestState]
    ) -> Iterator[CacheOperation]:
        """Yield the stores of blocks that this step's forward pass completes."""
        tables = output.kv_connector_block_state
        if tables is None:
            return
        write_back = self._config.write_policy == "write_back"
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = states.get(request_id)
            if state is None or state.outdated or write_back:
                continue
            request = state.request
            tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
            tokens -= self._unstable_tokens
            # Most decoding steps complete no block. Then the block table is not needed.
            block_ids = tables.get_block_ids(request_id) if state.due(tokens) else None
            if block_ids is None:
                continue
            operation = self.blocks(state, block_ids, tokens)
            if operation is not None:
                yield operation
        for request_id, entries in tables.boundary_state_offloads.items():
            operation = self._store_states(states.get(request_id), entries)
            if operation is not None:
                yield operation

    def blocks(
        self,
        state: RequestState,
        block_ids: Sequence[Sequence[int]],
        tokens: int,
        flush: bool = False,
    ) -> CacheOperation | None:
        """Store the blocks of a request that were not considered before. ``block_ids`` are those of
        each group, and ``tokens`` is the number of leading tokens with final KV. The store of a
        request that has ended (``flush``) is less urgent than others. The result is None if there
        is nothing to store, or no room."""
        source: list[tuple[PageKey, int]] = []
        for group in self._geometry.groups:
            if group.index in self._geometry.handed_off:
                continue
            keys, blocks = state.keys[group.index], block_ids[group.index]
            end = min(tokens // group.block_tokens, len(keys), len(blocks))
            new = slice(state.stored[group.index], end)
            source += [
                (key, block)
                for key, block in zip(keys[new], blocks[new])
                if block != NULL_BLOCK and self._admits(key)
            ]
            state.stored[group.index] = max(state.stored[group.index], end)
        return self._controller.store(source, 1 if flush else 0, state.volatile)

    def _store_states(
        self, state: RequestState | None, entries: Sequence[tuple[int, int, int]]
    ) -> CacheOperation | None:
        """Store recurrent states. vLLM hands each over with its block and its number of tokens."""
        if state is None or state.outdated:
            return None
        source: list[tuple[PageKey, int]] = []
        for group_index, block, boundary in entries:
            group = self._controller.groups.get(group_index)
            key = state.key_at(group, boundary) if group is not None else None
            if key is not None and block != NULL_BLOCK and self._admits(key):
                source.append((key, block))
        return self._controller.store(source, volatile=state.volatile)

    def _admits(self, key: PageKey) -> bool:
        if self._config.write_policy != "write_through_selective":
            return True
        return self._touches.count(key) >= self._config.write_after


def handed_out(output: SchedulerOutput) -> Iterator[int]:
    """Yield the blocks that a step gives to requests, including those of cache hits."""
    tables: list[Any] = [new.block_ids for new in output.scheduled_new_reqs]
    tables += [ids for ids in output.scheduled_cached_reqs.new_block_ids if ids is not None]
    for table in tables:
        for ids in table:
            yield from ids
    for copy in output.kv_cache_block_copies or ():
        yield copy.dst_block_id

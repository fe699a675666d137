"""KV connectors that copy K/V as simply as vLLM's contract permits, and what they were told."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


class Told(NamedTuple):
    """What a connector was told of a request: `tokens` have K/V, of `known` ones."""

    tokens: int
    known: int


@dataclass
class Share(KVConnectorMetadata):
    """Slots to copy in a step, a list for each request."""

    slots: list[list[int]] = field(default_factory=list)


class WatchingConnector(KVConnectorBase_V1):
    """Copies the K/V of the tokens that steps are said to compute, each token once.

    Both sides are in one process. So when a request ends, its copies are compared with its K/V, of
    which the engine's answer shows that it is right.

    Attributes:
        told: what was said of each step.
        ends: what was said at each request's end.
        copies: copied K/V by layer and slot.
        right: number of copies that were right, by layer.
        wrong: number of copies that were not.
        disagreed: number of steps of which two ways to count tokens disagreed.
    """

    told: list[Told]
    ends: list[Told]
    copies: dict[str, dict[int, torch.Tensor]]
    right: Counter[str]
    wrong: Counter[str]
    disagreed: int
    caches: dict[str, torch.Tensor]

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block = vllm_config.cache_config.block_size
        self._blocks: dict[str, list[int]] = {}
        self._sums: dict[str, int] = {}
        self._saved: dict[str, int] = {}
        self._requests: dict[str, Any] = {}

    @classmethod
    def forget(cls) -> None:
        cls.told, cls.ends, cls.copies = [], [], {}
        cls.right, cls.wrong, cls.disagreed = Counter(), Counter(), 0

    def slots(self, name: str, start: int, end: int) -> list[int]:
        """The slots of some tokens of a request."""
        blocks, size = self._blocks[name], self._block
        return [blocks[token // size] * size + token % size for token in range(start, end)]

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        type(self).caches = kv_caches

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Share:
        share = Share()
        for new in scheduler_output.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
            self._sums[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        ):
            self._blocks[name] += blocks[0] if blocks else []
            # Both ways to count: steps that follow each other, and vLLM's own numbers.
            counts = {computed, self._sums[name], self._requests[name].num_computed_tokens}
            type(self).disagreed += len(counts) > 1
            self._sums[name] = computed
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            self._sums[name] += tokens
            self.told.append(Told(self._sums[name], self._requests[name].num_tokens))
            share.slots.append(self.slots(name, self._saved.get(name, 0), self._sums[name]))
            self._saved[name] = max(self._saved.get(name, 0), self._sums[name])
        return share

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        tokens, known = request.num_computed_tokens, request.num_tokens
        self.ends.append(Told(tokens, known))
        # A draft's row holds the token behind its own, which the last one does not have.
        for slot in self.slots(request.request_id, 0, min(tokens, known - 1) - 1):
            for layer, cache in self.caches.items():
                if (copied := self.copies.get(layer, {}).get(slot)) is not None:
                    same = torch.equal(copied, self.row(cache, slot))
                    (self.right if same else self.wrong)[layer] += 1
        self.copies.clear()
        return False, None

    def row(self, cache: torch.Tensor, slot: int) -> torch.Tensor:
        """A slot's K/V in a layer's cache, which is [block, head, token, content]."""
        return cache[slot // self._block, :, slot % self._block].clone()

    def copy(self, layer: str, cache: torch.Tensor, slots: list[int]) -> None:
        for slot in slots:
            self.copies.setdefault(layer, {})[slot] = self.row(cache, slot)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any) -> None:
        share = self._get_connector_metadata()
        assert isinstance(share, Share)
        for slots in share.slots:
            self.copy(layer_name, kv_layer, slots)

    def wait_for_save(self) -> None:
        pass


class MirroringConnector(WatchingConnector):
    """Copies each slot that a pass writes, as the pass names them, in the order of the passes.

    With a chain the copies of accepted tokens are right, as their rows are written in their places.
    """

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any) -> None:
        from vllm.forward_context import get_forward_context

        slots = get_forward_context().slot_mapping
        assert isinstance(slots, dict)
        # Levels of a draft have none.
        if (found := slots.get(layer_name)) is not None:
            self.copy(layer_name, kv_layer, [slot for slot in found.tolist() if slot >= 0])

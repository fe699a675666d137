"""Plain attention, with K/V of every token and layer: Llama, Qwen, Mistral without windows, ..."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.attention import Attention

from vllm_graft.spec_decode.attention.layer import graft_attention
from vllm_graft.spec_decode.kernels.compact import KVCacheTable, compact_kv

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.block_table import BlockTables

    from vllm_graft.spec_decode.verification.context import TreeContext, VerifyStep


@dataclass
class DenseState:
    """K/V in pages: node i has the i-th new slot, and the accepted path moves to the front.

    Attributes:
        table: where the K/V of each layer lies.
        slot_mappings: int64 ``[groups, max_tokens]``, the slot of each row of the batch.
    """

    table: KVCacheTable
    slot_mappings: torch.Tensor

    def fork(self, step: VerifyStep) -> None:
        """Do nothing: every node has a slot of its own."""

    def commit(self, path: torch.Tensor, step: VerifyStep) -> None:
        """Move the accepted path's K/V to where a chain would have written it."""
        assert step.num_sampled is not None
        compact_kv(
            self.table,
            path,
            step.num_sampled,
            step.batch.query_start_loc,
            step.num_drafts,
            self.slot_mappings,
            num_reqs=step.batch.num_reqs,
        )


class DenseFamily:
    """Every token attends to all tokens before it; each layer has K/V of its own."""

    def claims(self, layer: Any) -> bool:
        return isinstance(layer, Attention)

    def attach(self, name: str, layer: Any, context: TreeContext, *, is_draft: bool) -> None:
        """Put tree attention over the layer's own."""
        graft_attention(name, layer, context, is_draft=is_draft)

    def state(
        self,
        layers: Mapping[str, Any],
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
    ) -> DenseState:
        """The K/V caches of the layers, and the slots of their groups."""
        caches, groups = [], []
        for index, group in enumerate(kv_cache_config.kv_cache_groups):
            for name in group.layer_names:
                if name in layers:
                    caches.append(layers[name].kv_cache)
                    groups.append(index)
        return DenseState(KVCacheTable.build(caches, groups), block_tables.slot_mappings)

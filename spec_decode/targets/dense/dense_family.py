"""Plain attention, with or without windows and sinks: Llama, Qwen, Mistral, Gemma, gpt-oss, ..."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.attention import Attention

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.kernels.compact import KVCacheTable, compact_kv
from vllm_graft.spec_decode.targets.dense.layer import graft_attention
from vllm_graft.spec_decode.targets.dense.window import window_of

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
    """Every token attends to the tokens before it, or to the last ones of them in a window.

    A layer has K/V of its own, or reads those of an earlier layer.
    """

    def claims(self, layer: Any) -> bool:
        return isinstance(layer, Attention)

    def attach(self, name: str, layer: Any, context: TreeContext, *, is_draft: bool) -> None:
        """Put tree attention over the layer's own.

        Raises:
            ConfigError: if the layer's K/V can't be read, or if a draft's window is too short.
        """
        window = window_of(layer.impl)
        if is_draft and 0 < window < context.shape.steps:
            raise ConfigError(
                f"--additional-config.graft.tree.steps is {context.shape.steps}, but layer {name} "
                f"of the draft has a window of {window} positions: set steps to {window} or less"
            )
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
                # A layer that reads another's K/V would have them moved twice.
                if name in layers and not layers[name].kv_sharing_target_layer_name:
                    caches.append(layers[name].kv_cache)
                    groups.append(index)
        return DenseState(KVCacheTable.build(caches, groups), block_tables.slot_mappings)

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

    `slot_mappings` is int64 ``[groups, max_tokens]``, the slot of each row of the batch.
    """

    table: KVCacheTable
    slot_mappings: torch.Tensor
    reads_rows: bool = False

    @classmethod
    def of(
        cls,
        caches: Mapping[str, torch.Tensor],
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
    ) -> DenseState:
        """The state of layers by name, each with its cache by heads."""
        groups = enumerate(kv_cache_config.kv_cache_groups)
        own = {name: n for n, group in groups for name in group.layer_names if name in caches}
        table = KVCacheTable.build([caches[name] for name in own], list(own.values()))
        return cls(table, block_tables.slot_mappings)

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
    """Every token attends to the tokens before it, or to the last ones of them in a window."""

    def claims(self, layer: Any) -> bool:
        return isinstance(layer, Attention)

    def attach(self, name: str, layer: Any, context: TreeContext, *, is_draft: bool) -> None:
        window = window_of(layer.impl)
        if is_draft and 0 < window < context.shape.steps:
            raise ConfigError(
                f"--additional-config.graft.tree.steps is {context.shape.steps}, but layer {name} "
                f"of the draft has a window of {window} positions: set steps to {window} or less"
            )
        graft_attention(name, layer, context, is_draft=is_draft)

    def state(
        self, layers: Mapping[str, Any], kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> DenseState:
        # A layer that reads another's K/V would have them moved twice.
        own = {n: each for n, each in layers.items() if not each.kv_sharing_target_layer_name}
        caches = {name: layer.kv_cache for name, layer in own.items()}
        return DenseState.of(caches, kv_cache_config, block_tables)

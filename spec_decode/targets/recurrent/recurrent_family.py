"""Recurrent layers: the gated delta rule, Kimi Delta Attention and Mamba-2. vLLM gives a request as
many blocks of states as it has rows to verify. A row of a tree continues its parent's state and
leaves its own in the block of its row; or it leaves its inputs in a buffer of the layer, and the
state that the accepted path ends in is made of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_graft.base.errors import ConfigError
from vllm_graft.seams.permission import require_seams
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import KeptRows
from vllm_graft.spec_decode.targets.recurrent.kernels.state_folds import (
    FoldedLayer,
    FoldTable,
    fold_states,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.state_moves import (
    RecurrentCache,
    StateTable,
    clear_states,
    move_states,
)
from vllm_graft.spec_decode.targets.recurrent.recurrent_kinds import (
    TreeDeltaRule,
    TreeKeyDecays,
    TreeSelectiveState,
)
from vllm_graft.spec_decode.targets.recurrent.recurrent_layer import TreeRecurrence, windows_of
from vllm_graft.spec_decode.verification.context import TreeContext, VerifyStep


@dataclass
class RecurrentState:
    """A state or kept inputs per node, and a window of the inputs of all nodes. `kept` says which
    requests have left inputs in place of states, `folds` by which layers; None if none does."""

    caches: list[RecurrentCache]
    table: StateTable
    kept: KeptRows | None = None
    folds: FoldTable | None = None
    reads_rows: bool = True

    def fork(self, step: VerifyStep) -> None:
        """Let prompts of one token that carry placeholders for drafts be verified, from zeros. vLLM
        pads such a prompt to the rows of a tree, and takes it for a prompt of so many tokens. So
        its state would be the one behind the placeholders. (Behind a token it is verified.)"""
        if self.kept is not None:
            self.kept.firsts.fill_(-1)
        batch = step.batch
        drafts, as_decodes = batch.num_draft_tokens_per_req, batch.prefill_runs_as_decode_np
        if drafts is None or as_decodes is None:
            return
        first = batch.is_prefilling_np & (drafts > 0) & ~as_decodes
        if not first.any():
            return
        batch.prefill_runs_as_decode_np = as_decodes | first
        for req in first.nonzero()[0].tolist():
            clear_states(self.caches, req, batch.seq_lens, by_prefix=self.table.by_prefix)

    def commit(self, path: torch.Tensor, step: VerifyStep) -> None:
        """Leave what a chain of the accepted nodes would have left, where it would have."""
        assert step.num_sampled is not None
        batch = step.batch
        if self.kept is not None and self.folds is not None:
            fold_states(
                self.folds, self.kept, batch.query_start_loc, path, step.num_sampled,
                batch.seq_lens, num_reqs=batch.num_reqs,
            )  # fmt: skip
        move_states(
            self.table, path, step.num_sampled, step.num_drafts, batch.seq_lens,
            num_reqs=batch.num_reqs, kept=self.kept,
            query_start_loc=None if self.kept is None else batch.query_start_loc,
        )  # fmt: skip


def _kind_of(layer: MambaBase) -> type[TreeRecurrence] | None:
    # The modules of these layers bring many kernels: they are there if such a layer is.
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    if isinstance(layer, QwenGatedDeltaNetAttention):
        return TreeDeltaRule
    if isinstance(layer, KimiGatedDeltaNetAttention):
        return TreeKeyDecays
    return TreeSelectiveState if isinstance(layer, MambaMixer2) else None


class RecurrentFamily:
    """Layers with a delta rule or Mamba-2, behind a short convolution."""

    def __init__(self) -> None:
        self._checked: set[str] = set()
        self._kept: KeptRows | None = None

    def claims(self, layer: Any) -> bool:
        return isinstance(layer, MambaBase) and _kind_of(layer) is not None

    def attach(self, name: str, layer: Any, context: TreeContext, *, is_draft: bool) -> None:
        if is_draft:
            raise ConfigError(
                f"--additional-config.graft.tree needs a draft of plain attention layers, but "
                f"layer {name} of the draft is recurrent: use another draft, or remove the "
                f"graft.tree keys to draft chains"
            )
        kind = _kind_of(layer)
        assert kind is not None
        for part in kind.SEAMS:
            if part not in self._checked:
                require_seams(part)
                self._checked.add(part)
        kind.graft(name, layer, context)
        self._kept = context.kept

    def state(
        self, layers: Mapping[str, Any], kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> RecurrentState:
        caches: list[RecurrentCache] = []
        folded: list[FoldedLayer] = []
        modes: set[str] = set()
        for index, group in enumerate(kv_cache_config.kv_cache_groups):
            spec: Any = group.kv_cache_spec
            for name in group.layer_names:
                if name in layers:
                    modes.add(spec.mamba_cache_mode)
                    cache = RecurrentCache(
                        windows=windows_of(layers[name]),
                        states=layers[name].kv_cache[1],
                        width=layers[name].conv1d.weight.shape[-1],
                        blocks=block_tables.input_block_tables[index],
                        block_size=spec.block_size,
                    )
                    caches.append(cache)
                    folded += _folded(layers[name], cache)
        by_prefix = "align" in modes
        table = StateTable.build(caches, by_prefix=by_prefix)
        if not folded:
            return RecurrentState(caches, table)
        return RecurrentState(
            caches, table, self._kept, FoldTable.build(folded, by_prefix=by_prefix)
        )


def _folded(layer: Any, cache: RecurrentCache) -> list[FoldedLayer]:
    trees: TreeRecurrence | None = getattr(layer, "tree_recurrence", None)
    if trees is None or trees.inputs is None:
        return []
    rates, bias = trees.fold_gates()
    return [
        FoldedLayer(
            trees.inputs, cache.states, rates, bias, trees.groups,
            cache.blocks, cache.block_size, trees.DECAY,
        )
    ]  # fmt: skip

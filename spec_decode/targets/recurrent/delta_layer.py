"""Grafts trees onto layers with the gated delta rule (GDN), in Qwen3-Next and Qwen3.5.

vLLM sends rows of requests that it verifies drafts of through a convolution and a recurrence of
their own, each row behind the row before. We stand before both, in ``_forward_core``, and let each
row continue its parent. All other rows are computed by the layer itself, as a batch of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.recurrent.kernels.delta_chunk import tree_delta_chunk
from vllm_graft.spec_decode.targets.recurrent.kernels.delta_rule import DeltaGates, tree_delta_rule
from vllm_graft.spec_decode.targets.recurrent.recurrent_form import allocate_inputs
from vllm_graft.spec_decode.targets.recurrent.recurrent_layer import (
    DeltaPart,
    convolved,
    kept_part,
    metadata_of,
    require_columns,
    told,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_inputs import LayerInputs
    from vllm_graft.spec_decode.verification.context import TreeContext


@dataclass
class TreeDeltaRule:
    """In place of a layer's ``_forward_core``: each verified row continues its parent's state.

    A pass either writes each row's state to the row's column, or writes no state and keeps the
    rows' inputs, by which the accepted path's state is made afterwards.

    Attributes:
        layer: the layer.
        context: what the tree parts of the worker share.
        stock: the layer's own ``_forward_core``.
        inputs: keeps the rows' inputs; None if every pass writes states.
    """

    layer: QwenGatedDeltaNetAttention
    context: TreeContext
    stock: Callable[..., None]
    inputs: LayerInputs | None = None

    def __call__(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Compute a batch into `core_attn_out` ``[num_tokens, value_heads, V]``.

        Args:
            mixed_qkv: ``[num_tokens, dim]``, queries, keys and values before the convolution.
            b: ``[num_tokens, value_heads]``, betas before the sigmoid.
            a: ``[num_tokens, value_heads]``, decays before the softplus.
            core_attn_out: zeros; receives the result.
        """
        metadata = metadata_of(self.layer)
        if metadata is None or metadata.spec_sequence_masks is None:
            # A run without attention, or prompts alone.
            self.stock(mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)
            return
        part = self.context.once(metadata, self._part)
        if part.others is None:
            used = metadata.num_actual_tokens
            self._verify(mixed_qkv[:used], b[:used], a[:used], part, core_attn_out[:used])
            return
        trees, others = metadata.spec_token_indx, metadata.non_spec_token_indx
        out = core_attn_out.new_zeros(len(trees), *core_attn_out.shape[1:])
        own_qkv, own_b, own_a = (each.index_select(0, trees) for each in (mixed_qkv, b, a))
        self._verify(own_qkv, own_b, own_a, part, out)
        core_attn_out.index_copy_(0, trees, out)
        out = core_attn_out.new_zeros(len(others), *core_attn_out.shape[1:])
        with told(self.layer, part.others):
            self.stock(
                mixed_qkv=mixed_qkv.index_select(0, others),
                b=b.index_select(0, others),
                a=a.index_select(0, others),
                core_attn_out=out,
            )
        core_attn_out.index_copy_(0, others, out)

    def _verify(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        part: DeltaPart,
        out: torch.Tensor,
    ) -> None:
        layer, rows = self.layer, part.rows
        kept = self.inputs if part.max_rows else None
        weights, silu = layer.conv1d.weight.flatten(1), layer.activation in ("silu", "swish")
        mixed = convolved(layer, mixed_qkv, weights, rows, kept, silu=silu)
        gates = DeltaGates(a, b, layer.A_log, layer.dt_bias)
        key_heads = layer.num_k_heads // layer.tp_size
        if kept is None:
            tree_delta_rule(mixed, gates, layer.kv_cache[1], rows, out, key_heads=key_heads)
            return
        assert self.context.kept is not None
        tree_delta_chunk(
            mixed,
            gates,
            layer.kv_cache[1],
            rows,
            self.context.kept,
            kept.gates,
            out,
            key_heads=key_heads,
            max_rows=part.max_rows,
        )

    def _part(self, metadata: GDNAttentionMetadata) -> DeltaPart:
        """Where trees are, and what is kept of them. Layers of one metadata object share it."""
        return kept_part(metadata, self.context)


def graft_delta_rule(name: str, layer: QwenGatedDeltaNetAttention, context: TreeContext) -> None:
    """Make the layer `name` compute tree rows besides what it does already.

    Raises:
        ConfigError: if the platform computes the layer by other kernels than CUDA's, or keeps its
            states in another way than a column per row.
    """
    method = layer._forward_method.__name__
    if method != "forward_cuda":
        raise ConfigError(
            f"--additional-config.graft.tree needs vLLM's kernels for NVIDIA GPUs for the "
            f"recurrent layer {name}, but this platform computes it by {method}: set "
            f"--additional-config.graft.tree.topk to 1 for a chain"
        )
    require_columns(name, layer)
    # One kernel of vLLM's computes convolved rows of chains together with the norm behind them.
    layer.gdn_decode_kernel = "triton"
    inputs = None
    if context.recurrent_form != "states":
        inputs = allocate_inputs(layer.conv1d.weight, (2, layer.A_log.shape[0]), context)
    layer._forward_core = TreeDeltaRule(layer, context, layer._forward_core, inputs)

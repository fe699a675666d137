"""Grafts trees onto layers with Kimi Delta Attention (KDA), in Kimi Linear.

vLLM sends rows of requests that it verifies drafts of through a convolution and a recurrence of
their own, each row behind the row before, and all rows through a gated norm behind that. We stand
before all three, in ``_forward``, and let each verified row continue its parent. All other rows are
computed by the layer itself, as a batch of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture

from vllm_graft.spec_decode.targets.recurrent.kernels.key_decay_chunk import tree_key_decay_chunk
from vllm_graft.spec_decode.targets.recurrent.kernels.key_decays import KeyDecays, tree_key_decays
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
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import (
        KimiGatedDeltaNetAttention,
    )
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_inputs import LayerInputs
    from vllm_graft.spec_decode.verification.context import TreeContext


@dataclass
class TreeKeyDecays:
    """In place of a layer's ``_forward``: each verified row continues its parent's state.

    A pass writes each row's state, or keeps the rows' inputs, as of `TreeDeltaRule`.

    Attributes:
        layer: the layer.
        context: what the tree parts of the worker share.
        stock: the layer's own ``_forward``.
        inputs: keeps the rows' inputs; None if every pass writes states.
    """

    layer: KimiGatedDeltaNetAttention
    context: TreeContext
    stock: Callable[..., None]
    inputs: LayerInputs | None = None

    def __call__(
        self,
        mixed_qkv: torch.Tensor,
        g1: torch.Tensor,
        g2: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Compute a batch into `core_attn_out` ``[1, num_tokens, heads, V]``.

        Args:
            mixed_qkv: ``[num_tokens, dim]``, queries, keys and values before the convolution.
            g1: ``[1, num_tokens, heads, K]``, decays before the activation.
            g2: ``[num_tokens, heads, V]``, the norm's gate.
            beta: ``[1, num_tokens, heads]``, betas before the sigmoid.
            core_attn_out: receives the result.
        """
        metadata = metadata_of(self.layer)
        if metadata is None or metadata.spec_sequence_masks is None:
            # A run without attention, or prompts alone.
            self.stock(mixed_qkv=mixed_qkv, g1=g1, g2=g2, beta=beta, core_attn_out=core_attn_out)
            return
        out = core_attn_out[0]
        part = self.context.once(metadata, self._part)
        if part.others is None:
            used = metadata.num_actual_tokens
            # Rows of no request, such as a graph's padding, must not be NaN.
            out.zero_()
            self._verify(mixed_qkv[:used], g1[0, :used], beta[0, :used], part, out[:used])
            out.copy_(self.layer.o_norm(out, g2))
            return
        out.zero_()
        trees, others = metadata.spec_token_indx, metadata.non_spec_token_indx
        found = out.new_zeros(len(trees), *out.shape[1:])
        qkv, decays, betas = (each.index_select(0, trees) for each in (mixed_qkv, g1[0], beta[0]))
        self._verify(qkv, decays, betas, part, found)
        out.index_copy_(0, trees, self.layer.o_norm(found, g2.index_select(0, trees)))
        found = out.new_zeros(len(others), *out.shape[1:])
        with told(self.layer, part.others):
            self.stock(
                mixed_qkv=mixed_qkv.index_select(0, others),
                g1=g1.index_select(1, others),
                g2=g2.index_select(0, others),
                beta=beta.index_select(1, others),
                core_attn_out=found[None],
            )
        out.index_copy_(0, others, found)

    def _verify(
        self,
        mixed_qkv: torch.Tensor,
        decays: torch.Tensor,
        betas: torch.Tensor,
        part: DeltaPart,
        out: torch.Tensor,
    ) -> None:
        layer, rows = self.layer, part.rows
        kept = self.inputs if part.max_rows else None
        weights = layer.conv1d.weight.flatten(1)
        mixed = convolved(layer, mixed_qkv, weights, rows, kept, silu=True)
        gates = KeyDecays(decays, betas, layer.A_log, layer.dt_bias, layer.gate_lower_bound)
        if kept is None:
            tree_key_decays(mixed, gates, layer.kv_cache[1], rows, out)
            return
        assert self.context.kept is not None
        tree_key_decay_chunk(
            mixed,
            gates,
            layer.kv_cache[1],
            rows,
            self.context.kept,
            kept.gates,
            out,
            max_rows=part.max_rows,
        )

    def _part(self, metadata: GDNAttentionMetadata) -> DeltaPart:
        """Where trees are, and what is kept of them. Layers of one metadata object share it."""
        return kept_part(metadata, self.context)


def graft_key_decays(name: str, layer: KimiGatedDeltaNetAttention, context: TreeContext) -> None:
    """Make the layer `name` compute tree rows besides what it does already.

    Raises:
        ConfigError: if the layer keeps its states in another way than a column per row.
    """
    require_columns(name, layer)
    # Its own is no part of a PIECEWISE graph, which it interrupts; nor is ours.
    inputs = None
    if context.recurrent_form != "states":
        weight, heads = layer.conv1d.weight, len(layer.A_log)
        keys = weight.shape[0] // (3 * heads)
        # The convolution's own weights are float32 in a model of 16 bits, too.
        dtype = layer.model_config.dtype
        inputs = allocate_inputs(weight, (keys + 1, heads), context, dtype)
    trees = TreeKeyDecays(layer, context, layer._forward, inputs)
    layer._forward = eager_break_during_capture(trees)

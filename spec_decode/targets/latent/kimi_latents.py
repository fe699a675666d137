"""Grafts tree attention onto the layers with MLA of Kimi Linear, which are a class of their own.

Such a layer writes latents to the cache in the pass that makes their queries. So we stand before
both, in ``_attention``. The layer's own operation writes a batch of trees alone, and our kernel
attends; the layer computes a batch with prompts, and rows of trees are computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.latent.latent_layer import LatentTrees, ops_for
from vllm_graft.spec_decode.verification.context import VerifyMode

if TYPE_CHECKING:
    from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention

    from vllm_graft.spec_decode.verification.context import TreeContext


@dataclass
class TreeKimiLatents(LatentTrees):
    """In place of a layer's ``_attention`` (`stock`): computes tree rows, passes other rows on."""

    stock: Callable[..., None]

    def __call__(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        attn_out: torch.Tensor,
    ) -> None:
        """Compute attention into `attn_out` ``[num_tokens, num_heads * v_head_dim]``.

        Args:
            positions: ``[num_tokens]``, not used, as the layer has no rotations.
            q: ``[num_tokens, num_heads, qk_head_dim]``.
            kv_c_normed: latents of the rows ``[num_tokens, rank]``.
            k_pe: keys that heads share ``[num_tokens, 1, rope]``.
        """
        known, mode = get_forward_context().attn_metadata, self.context.mode
        plain = not isinstance(known, dict) or mode is VerifyMode.NONE
        if plain or mode is VerifyMode.MIXED:
            self.stock(positions, q, kv_c_normed, k_pe, attn_out)
        if plain:
            return
        layer = self.layer
        metadata = known[layer.layer_name]
        count = self.part(metadata).num_tokens
        query, rope = self.absorbed(q[:count])
        if mode is not VerifyMode.MIXED:
            self._write(query, rope, kv_c_normed[:count], k_pe[:count])
        self.verify(query, rope, layer._attn_read_kv_cache(), metadata, attn_out)

    def _write(
        self, query: torch.Tensor, rope: torch.Tensor, latents: torch.Tensor, keys: torch.Tensor
    ) -> None:
        """Write the latents of the rows to the cache, as the layer writes those of decodes."""
        layer = self.layer
        slots = get_forward_context().slot_mapping
        assert isinstance(slots, dict)
        own = slots[layer.layer_name][: len(query)]
        layer._decode_concat_cache(query, rope, latents, keys, None, None, own)


def graft_kimi_latents(
    name: str, layer: MultiHeadLatentAttention, context: TreeContext, *, is_draft: bool
) -> None:
    """Make the layer `name` compute tree rows besides what it does already, or refuse it."""
    if is_draft or layer.rotary_emb is not None:
        raise ConfigError(
            f"--additional-config.graft.tree does not support layers like {name}, a "
            f"{type(layer).__name__} {'of a draft' if is_draft else 'with rotations'}: remove the "
            f"graft.tree keys to draft chains"
        )
    trees = TreeKimiLatents(layer, context, ops_for(name, layer), layer._attention)
    layer.tree_latents = trees
    # Its own is no part of a PIECEWISE graph, which it interrupts; nor is ours.
    layer._attention = eager_break_during_capture(trees)

"""Paged attention in plain torch for a CPU: vLLM's own kernels pack K in a private layout."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.dense.plain_attention import attended, gathered
from vllm_graft.spec_decode.targets.dense.window import WholeBatch, chunk_of, first_key, window_of

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention


class TorchMetadataBuilder(AttentionMetadataBuilder[WholeBatch]):
    """Passes the common metadata on."""

    _cudagraph_support = AttentionCGSupport.NEVER
    supports_draft_decode_metadata_update = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> WholeBatch:
        return WholeBatch.of(common_attn_metadata)

    def update_draft_decode_metadata(self, metadata: WholeBatch) -> None:
        """Do nothing: the metadata holds the persistent buffers, so it never goes stale."""


class TorchAttentionBackend(AttentionBackend):
    """Backend over a cache ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_impl_cls() -> type[TorchAttentionImpl]:
        return TorchAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TorchMetadataBuilder]:
        return TorchMetadataBuilder


class TorchAttentionImpl(AttentionImpl[WholeBatch]):
    """Causal decoder attention, computed one request after another."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        *,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
        chunk: int = 0,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.kv_cache_dtype = float(scale), "auto"
        self.sliding_window, self.sinks, self.chunk = sliding_window, sinks, chunk

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store K and V ``[num_tokens, num_kv_heads, head_size]`` at their slots; -1 is padding."""
        slots = slot_mapping[: key.shape[0]]
        rows = (slots >= 0).nonzero().flatten()
        block, offset = slots[rows] // kv_cache.shape[2], slots[rows] % kv_cache.shape[2]
        kv_cache[block, :, offset] = torch.cat([key[rows], value[rows]], -1).to(kv_cache.dtype)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: WholeBatch,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute causal attention into `output` ``[num_tokens, num_heads, head_size]``."""
        if attn_metadata is None:
            return output.zero_()
        window, chunked = self.chunk or window_of(self), self.chunk > 0
        starts = itertools.pairwise(attn_metadata.query_start_loc.tolist())
        # Padding may follow the requests.
        each = zip(starts, attn_metadata.seq_lens.tolist(), attn_metadata.block_table)
        for (first, last), length, blocks in each:
            if last == first:
                continue
            places = range(length - last + first, length)
            edges = [first_key(place, window, chunked=chunked) for place in places]
            visible = torch.ones(len(places), length, dtype=torch.bool).tril(places.start)
            visible &= torch.arange(length) >= torch.tensor(edges)[:, None]
            # Blocks before the window may be the null block, which may hold NaN.
            keys, values = gathered(kv_cache, blocks, length, first=edges[0])
            output[first:last] = attended(
                query[first:last].float(),
                keys,
                values,
                visible[:, edges[0] :],
                self.scale,
                sinks=self.sinks,
            )
        return output


def replace(layer: Attention) -> None:
    """Give a loaded attention layer this backend in place of vLLM's CPU backend."""
    old: Any = layer.impl
    if layer.kv_cache_dtype.startswith("fp8") or getattr(old, "logits_soft_cap", 0):
        raise ConfigError(
            "--additional-config.graft.tree on a CPU supports neither --kv-cache-dtype fp8 nor "
            f"capped attention logits (kv_cache_dtype is {layer.kv_cache_dtype})"
        )
    layer.attn_backend = TorchAttentionBackend
    layer.impl = TorchAttentionImpl(
        old.num_heads,
        old.head_size,
        old.scale,
        layer.num_kv_heads,
        sliding_window=old.sliding_window,
        sinks=old.sinks,
        chunk=chunk_of(layer),
    )

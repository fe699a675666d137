"""Sliding windows and chunks: where they begin for a row, and the whole batch of chunked layers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backend import subclass_attention_backend

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata

_KEPT = "graft_whole_batch"


def window_of(impl: Any) -> int:
    """The positions that a row of an ``AttentionImpl`` sees, its own among them; 0 for all."""
    window = getattr(impl, "sliding_window", None)
    if isinstance(window, (tuple, list)):
        # GPU backends keep a pair, keys before and behind a row.
        window = window[0] + 1
    return max(0, window or 0)


def chunk_of(layer: Any) -> int:
    """The positions that share a chunk in a layer of vLLM's ``ChunkedLocalAttention``; else 0."""
    return getattr(layer, "attention_chunk_size", None) or 0


def first_key(position: int, window: int, *, chunked: bool = False) -> int:
    """The position of the first key that a row at `position` sees; a `window` of 0 is none."""
    if not window:
        return 0
    return position // window * window if chunked else max(0, position - window + 1)


@dataclass
class WholeBatch:
    """What tree attention reads of a batch, under the names that every paged backend has.

    Attributes:
        query_start_loc: i32 ``[num_reqs + 1]``.
        seq_lens: i32 ``[num_reqs]``, keys per request, including those of its new tokens.
        block_table: i32 ``[num_reqs, max_blocks]``.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, common: CommonAttentionMetadata) -> WholeBatch:
        """The batch that vLLM describes to all backends; its tensors are the persistent buffers."""
        return cls(
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.max_query_len,
            common.max_seq_len,
        )


def whole_batch(metadata: Any) -> Any:
    """The batch that a layer's metadata was built for; the metadata itself where it is whole."""
    return getattr(metadata, _KEPT, metadata)


def keep_whole_batches(layer: Attention) -> None:
    """Let the metadata of a loaded layer with chunked attention hold the whole batch as well.

    vLLM makes a sequence of each chunk that a request's rows lie in, and builds the platform's
    metadata for these (``make_local_attention_virtual_batches``). It asks for the layer's backend
    when all layers are loaded.
    """
    layer.attn_backend = _keeping(layer.attn_backend)


@functools.cache
def _keeping(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """A backend's subclass whose builder keeps the batch; one class per backend, as vLLM groups."""
    stock: Any = backend.get_builder_cls()

    class WholeBatchBuilder(stock):
        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            setattr(metadata, _KEPT, WholeBatch.of(common_attn_metadata))
            return metadata

    whole: type[AttentionBackend] = subclass_attention_backend("Whole", backend, WholeBatchBuilder)
    return whole

"""Calls of the kernels by which vLLM computes a chain of rows: the yardsticks.

None of them has a tree mask. Each is called as vLLM's backend calls it in a FULL graph. What vLLM
makes once per step, outside of the graph, is made outside of it here, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.attention.problems import Batch
from benchmarks.attention.shapes import KvLayer, LatentLayer, Layer
from vllm_graft.spec_decode.trees.batch import LatentBatch, TreeBatch

Calls = list[Callable[[], torch.Tensor]]
"""A call per batch; it returns ``[num_reqs * rows, num_heads, size]``."""

MAX_SPLITS = 32
"""Splits that vLLM allows FlashAttention in a graph (``flash_attn_max_num_splits_for_cuda_graph``).
"""


class Yardstick(NamedTuple):
    """A kernel of the platform.

    Attributes:
        name: vLLM's name of its backend, and what is special.
        make: makes a call per batch, of the last so many rows of each request; the last argument
            bounds the keys of a request.
    """

    name: str
    make: Callable[[Sequence[Any], int, int], Calls]


def yardsticks(layer: Layer) -> list[Yardstick]:
    """What computes a layer on Hopper, in the order in which vLLM prefers it."""
    if isinstance(layer, LatentLayer):
        return [
            Yardstick("FLASH_ATTN_MLA", flash_latents),
            Yardstick("FLASHMLA", flash_mla),
            Yardstick("TRITON_MLA", triton_latents),
        ]
    graph = functools.partial(flash, layer)
    alone = functools.partial(flash, layer, in_graph=False)
    return [Yardstick("FLASH_ATTN", graph), Yardstick("FLASH_ATTN, its own splits", alone)]


def last_rows(tensor: torch.Tensor, num_reqs: int, rows: int) -> torch.Tensor:
    """The last rows of each request, ``[num_reqs * rows, ...]``."""
    each = len(tensor) // num_reqs
    if rows == each:
        return tensor
    return tensor.unflatten(0, (num_reqs, each))[:, -rows:].flatten(0, 1)


def flash(
    layer: KvLayer, batches: Sequence[TreeBatch], rows: int, longest: int, *, in_graph: bool = True
) -> Calls:
    """FlashAttention 3; outside of graphs vLLM has it decide on its splits by itself."""
    from vllm.vllm_flash_attn.flash_attn_interface import (
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    first = batches[0]
    query = last_rows(first.query, first.num_reqs, rows)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    window = (layer.window - 1, 0) if layer.window else (-1, -1)
    told = _told(first, rows, longest, MAX_SPLITS if in_graph else 0)
    plan = None
    if in_graph and layer.alike:
        plan = get_scheduler_metadata(
            batch_size=first.num_reqs,
            num_heads_q=layer.heads,
            num_heads_kv=layer.kv_heads,
            headdim=layer.head_size,
            cache_seqlens=first.seq_lens,
            qkv_dtype=query.dtype,
            page_size=layer.block_size,
            window_size=window,
            **told,
        )

    def call(batch: TreeBatch) -> torch.Tensor:
        key, value = batch.kv_cache.transpose(1, 2).chunk(2, dim=-1)
        flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            out=out,
            seqused_k=batch.seq_lens,
            block_table=batch.block_table,
            softmax_scale=batch.scale,
            window_size=list(window),
            scheduler_metadata=plan,
            s_aux=batch.sinks,
            fa_version=3,
            **told,
        )
        return out

    return [functools.partial(call, batch) for batch in batches]


def flash_latents(batches: Sequence[LatentBatch], rows: int, longest: int) -> Calls:
    """FlashAttention 3 with rotated parts as keys and latents as values."""
    from vllm.vllm_flash_attn.flash_attn_interface import (
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    first = batches[0]
    query, rope, keys = _latent_rows(first, rows)
    told, rank = _told(first, rows, longest, MAX_SPLITS), query.shape[2]
    plan = get_scheduler_metadata(
        batch_size=first.num_reqs,
        num_heads_q=query.shape[1],
        num_heads_kv=1,
        headdim=rope.shape[2],
        headdim_v=rank,
        cache_seqlens=keys,
        qkv_dtype=query.dtype,
        page_size=first.latents.shape[1],
        **told,
    )

    def call(batch: LatentBatch) -> torch.Tensor:
        found: torch.Tensor = flash_attn_varlen_func(
            q=rope,
            k=batch.latents[..., rank:].unsqueeze(-2),
            v=batch.latents[..., :rank].unsqueeze(-2),
            q_v=query,
            seqused_k=keys,
            block_table=batch.block_table,
            softmax_scale=batch.scale,
            scheduler_metadata=plan,
            fa_version=3,
            **told,
        )
        return found

    return [functools.partial(call, batch) for batch in batches]


def flash_mla(batches: Sequence[LatentBatch], rows: int, longest: int) -> Calls:
    """FlashMLA, whose plan the first call makes, before a graph is captured."""
    from vllm.v1.attention.ops.flashmla import (
        flash_mla_with_kvcache,
        get_mla_metadata,
        is_flashmla_dense_supported,
    )

    known, why = is_flashmla_dense_supported()
    if not known:
        raise RuntimeError(why)
    first = batches[0]
    query, rope, keys = _latent_rows(first, rows)
    heads, rank = query.shape[1:]
    plan, _ = get_mla_metadata(keys, rows * heads, 1, is_fp8_kvcache=False)

    def call(batch: LatentBatch) -> torch.Tensor:
        # VLLM joins the parts in each layer, too.
        joined = torch.cat([query, rope], -1)
        found, _ = flash_mla_with_kvcache(
            q=joined.unflatten(0, (batch.num_reqs, rows)),
            k_cache=batch.latents.unsqueeze(-2),
            block_table=batch.block_table,
            cache_seqlens=keys,
            head_dim_v=rank,
            tile_scheduler_metadata=plan,
            softmax_scale=batch.scale,
            causal=True,
            is_fp8_kvcache=False,
        )
        return torch.as_tensor(found).flatten(0, 1)

    return [functools.partial(call, batch) for batch in batches]


def triton_latents(batches: Sequence[LatentBatch], rows: int, longest: int) -> Calls:
    """vLLM's Triton kernel, to which each row of a chain is a request of its own."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.triton_mla import _compute_num_kv_splits
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    first = batches[0]
    query, rope, keys = _latent_rows(first, rows)
    heads, rank = query.shape[1:]
    tokens = len(query)
    splits = _compute_num_kv_splits(longest, current_platform.num_compute_units())
    numbers = tokens * heads * splits * (rank + 1)
    if numbers >= 1 << 31:
        # It counts in int32, and what it reads beyond is an error that no later call survives.
        raise RuntimeError(f"its partial results are {numbers} numbers, more than it can count")
    partial = query.new_empty(tokens, heads, splits, rank + 1, dtype=torch.float32)
    one = torch.ones((), device=query.device)
    offsets = torch.arange(1 - rows, 1, device=query.device, dtype=keys.dtype)

    def call(batch: LatentBatch) -> torch.Tensor:
        out = query.new_zeros(tokens, heads, rank)
        decode_attention_fwd(
            torch.cat([query, rope], -1),
            batch.latents.unsqueeze(2),
            batch.latents[..., :rank].unsqueeze(2),
            out,
            query.new_zeros(tokens, heads),
            batch.block_table.repeat_interleave(rows, dim=0),
            (keys.unsqueeze(1) + offsets).flatten(),
            partial,
            splits,
            batch.scale,
            batch.latents.shape[1],
            k_scale=one,
            v_scale=one,
            is_mla=True,
        )
        return out

    return [functools.partial(call, batch) for batch in batches]


def _latent_rows(batch: LatentBatch, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both parts of the last rows' queries, and the keys of each request."""
    parts = (last_rows(part, batch.num_reqs, rows) for part in (batch.query, batch.query_rope))
    query, rope = parts
    return query, rope, batch.prefix_lens + batch.num_rows


def _told(batch: Batch, rows: int, longest: int, splits: int) -> dict[str, Any]:
    """What FlashAttention and its plan are both told of chains."""
    end, device = batch.num_reqs * rows + 1, batch.row_masks.device
    return {
        "cu_seqlens_q": torch.arange(0, end, rows, dtype=torch.int32, device=device),
        "max_seqlen_q": rows,
        "max_seqlen_k": longest,
        "causal": True,
        "num_splits": splits,
    }

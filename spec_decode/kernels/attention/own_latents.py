"""Attention of tree rows over the tree's own latents (MLA), merged with that over the prefix."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.attention.attention_call import (
    check_last_strides,
    check_masked_rows,
    check_prefix,
)
from vllm_graft.spec_decode.kernels.attention.attention_kernel import (
    _merged_weights,
    _tree_rows,
)
from vllm_graft.spec_decode.kernels.attention.latent_kernel import _latent_logits
from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import cdiv, next_power_of_2
from vllm_graft.spec_decode.trees.batch import LatentBatch

_TILE = 32
"""Rows times heads of a program. Its accumulator, of 512 numbers each, fits 8 warps' registers."""


@Kernel
@triton.jit(do_not_specialize=["lse_head_stride"])
def own_latents_kernel(
    query,
    query_rope,
    latents,
    prefix_out,
    prefix_lse,
    out,
    query_start_loc,
    prefix_lens,
    block_table,
    row_masks,
    num_rows,
    scale,
    query_row_stride,
    query_head_stride,
    rope_row_stride,
    rope_head_stride,
    prefix_row_stride,
    prefix_head_stride,
    lse_head_stride,
    lse_row_stride,
    out_row_stride,
    out_head_stride,
    cache_block_stride,
    cache_slot_stride,
    table_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile, of a request's rows x heads, over all latents of its tree."""
    tile = tl.program_id(0) * BLOCK_M
    req = tl.program_id(1).to(tl.int64)
    first_key = tl.load(prefix_lens + req)
    rows, first_row = _tree_rows(query_start_loc, num_rows, req, MAX_ROWS)
    if tile >= rows * HEADS:
        return

    n = tl.arange(0, BLOCK_N)
    exists = n < rows
    key = first_key + n
    page = tl.load(block_table + req * table_stride + key // BLOCK_SIZE, mask=exists, other=0)
    m = tile + tl.arange(0, BLOCK_M)
    inside = m < rows * HEADS
    row = first_row + m // HEADS
    head = m % HEADS
    d = tl.arange(0, RANK_PAD)
    in_rank = d < RANK
    r = tl.arange(0, ROPE_PAD)
    in_rope = r < ROPE
    element = inside[:, None] & in_rank[None, :]
    q_at = row * query_row_stride + head * query_head_stride
    q = tl.load(query + q_at[:, None] + d[None, :], mask=element, other=0.0)
    rope_at = row * rope_row_stride + head * rope_head_stride
    rotated = inside[:, None] & in_rope[None, :]
    q_rope = tl.load(query_rope + rope_at[:, None] + r[None, :], mask=rotated, other=0.0)
    mask = tl.load(row_masks + row, mask=inside, other=0)
    # What the first pass leaves for a request without a prefix is not read.
    has_prefix = first_key > 0
    lse_at = head * lse_head_stride + row * lse_row_stride
    lse = tl.load(prefix_lse + lse_at, mask=inside & has_prefix, other=float("-inf"))
    at = page.to(tl.int64) * cache_block_stride + (key % BLOCK_SIZE) * cache_slot_stride
    pointers = latents + at[:, None]
    k = tl.load(pointers + d[None, :], mask=exists[:, None] & in_rank[None, :], other=0.0)
    k_rope = tl.load(
        pointers + RANK + r[None, :], mask=exists[:, None] & in_rope[None, :], other=0.0
    )

    # Logits in units of log 2, for exp2.
    logits = _latent_logits(q, q_rope, k, k_rope, scale * 1.4426950408889634, PRECISION)
    bit = (mask[:, None] >> n[None, :].to(tl.int64)) & 1
    logits = tl.where((bit != 0) & exists[None, :], logits, float("-inf"))
    weights, prefix_weight, total = _merged_weights(logits, lse, None)
    acc = tl.dot(weights.to(k.dtype), k, input_precision=PRECISION)
    prefix_at = row * prefix_row_stride + head * prefix_head_stride
    prefix = tl.load(
        prefix_out + prefix_at[:, None] + d[None, :], mask=element & has_prefix, other=0.0
    )
    acc += prefix.to(tl.float32) * prefix_weight[:, None]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_at = row * out_row_stride + head * out_head_stride
    tl.store(out + out_at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=element)


def attend_own_latents(
    batch: LatentBatch, prefix_out: torch.Tensor, prefix_lse: torch.Tensor, out: torch.Tensor
) -> None:
    """The second of two passes over latents: a tree's own ones, then the merge.

    The partial softmaxes are merged by their log-sum-exp (flash-decoding, arXiv:2311.01282). The
    result equals that of `latent_attention` if the first pass saw the latents before each tree. No
    device value is read on the host.

    Args:
        batch: A batch whose latents have the dtype of its query.
        prefix_out: ``[num_tokens, num_heads, rank]``, the first pass's output, any floating dtype.
            Not read for a request without a prefix.
        prefix_lse: f32 ``[num_heads, num_tokens]``, its log-sum-exp, natural logarithm.
        out: Like the query; rows that are not computed stay untouched.

    Raises:
        ValueError: if shapes, dtypes or strides are not these.
    """
    if batch.num_reqs == 0:
        return
    _check(batch, prefix_out, prefix_lse, out)
    query, rope, latents, max_rows = batch.query, batch.query_rope, batch.latents, batch.max_rows
    num_heads, rank = query.shape[1:]
    rows = max_rows * num_heads
    block_m = min(_TILE, max(16, next_power_of_2(rows)))
    own_latents_kernel[(cdiv(rows, block_m), batch.num_reqs)](
        query,
        rope,
        latents,
        prefix_out,
        prefix_lse,
        out,
        batch.query_start_loc,
        batch.prefix_lens,
        batch.block_table,
        batch.row_masks,
        batch.num_rows,
        batch.scale,
        *query.stride()[:2],
        *rope.stride()[:2],
        *prefix_out.stride()[:2],
        *prefix_lse.stride(),
        *out.stride()[:2],
        *latents.stride()[:2],
        batch.block_table.stride(0),
        HEADS=num_heads,
        RANK=rank,
        RANK_PAD=max(16, next_power_of_2(rank)),
        ROPE=rope.shape[2],
        ROPE_PAD=max(16, next_power_of_2(rope.shape[2])),
        BLOCK_SIZE=latents.shape[1],
        MAX_ROWS=max_rows,
        BLOCK_M=block_m,
        BLOCK_N=max(16, next_power_of_2(max_rows)),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=8,
        num_stages=1,
    )


def _check(
    batch: LatentBatch, prefix_out: torch.Tensor, prefix_lse: torch.Tensor, out: torch.Tensor
) -> None:
    check_masked_rows(batch.max_rows)
    query, rope, latents = batch.query, batch.query_rope, batch.latents
    width = query.shape[2] + rope.shape[2]
    if latents.shape[2] != width or rope.shape[:2] != query.shape[:2]:
        raise ValueError(
            f"queries of {tuple(query.shape)} and {tuple(rope.shape)} do not fit latents of "
            f"{tuple(latents.shape)}"
        )
    check_prefix(query, prefix_out, prefix_lse)
    if out.shape != query.shape:
        raise ValueError(f"the output is {tuple(out.shape)}, the query {tuple(query.shape)}")
    if not query.dtype == rope.dtype == latents.dtype == out.dtype:
        raise ValueError(
            f"queries of {query.dtype} and {rope.dtype}, latents of {latents.dtype} and an output "
            f"of {out.dtype} must have one dtype"
        )
    check_last_strides(query, rope, latents, prefix_out, out)

"""Attention of tree rows over the tree's own latents (MLA), merged with that over the prefix."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.attention.attention_kernel import _tree_rows
from vllm_graft.spec_decode.kernels.attention.own_rows import merged_weights
from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, cdiv, next_power_of_2
from vllm_graft.spec_decode.trees.batch import LatentBatch

_PROGRAMS = 256
"""Programs of a launch from which on each takes more rows: about two for each multiprocessor."""


class OwnTile(NamedTuple):
    """Sizes of a program of the second pass. Rows times heads, and numbers of a latent that are
    multiplied at a time, are powers of 2 from 16 on. `stages` are chunks under way at a time."""

    rows: int
    chunk: int
    warps: int
    stages: int


@functools.cache
def own_tile(num_reqs: int, rows: int, rank: int) -> OwnTile:
    """Sizes of a program for requests of at most `rows` rows times heads, by values of the host. A
    program reads all latents of its tree, so large tiles read less. A latent goes through in
    chunks, because an accumulator of all its numbers takes so many registers that a multiprocessor
    has room for one program, which then waits for memory."""
    most = max(16, next_power_of_2(rows))
    wide = [size for size in (64, 32) if num_reqs * cdiv(rows, size) >= _PROGRAMS]
    size = min(most, wide[0] if wide else 16)
    chunk = min(64 if size == 64 else 128, max(16, next_power_of_2(rank)))
    return OwnTile(size, chunk, 8 if size == 64 else 4, 3)


@Kernel
@triton.jit(do_not_specialize=["num_reqs", "num_pairs", "lse_head_stride"])
def own_latents_kernel(
    query, query_rope, latents, prefix_out, prefix_lse, out, query_start_loc, prefix_lens,
    block_table, row_masks, num_rows, scale, num_reqs, num_pairs,
    query_row_stride, query_head_stride, rope_row_stride, rope_head_stride,
    prefix_row_stride, prefix_head_stride, lse_head_stride, lse_row_stride,
    out_row_stride, out_head_stride, cache_block_stride, cache_slot_stride, table_stride,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, MAX_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile, of a request's rows x heads, over all latents of its tree. ``prefix_out`` and
    ``out`` may be one tensor: a program reads no element that another writes."""
    req = tl.program_id(1).to(tl.int64)
    start = tl.load(query_start_loc + req).to(tl.int64)
    first_key = tl.load(prefix_lens + req)
    rows, first_row = _tree_rows(query_start_loc, num_rows, req, MAX_ROWS)
    after_all = tl.load(query_start_loc + num_reqs)
    c = tl.arange(0, CHUNK)

    # Rows behind the last request's, which a graph has where fewer run than it was captured for.
    # All programs share them.
    number = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    step = tl.num_programs(0) * tl.num_programs(1) * BLOCK_M
    for begin in range(number * BLOCK_M, num_pairs, step):
        if begin + BLOCK_M > after_all * HEADS:
            pair = begin + tl.arange(0, BLOCK_M)
            blank = (pair >= after_all * HEADS) & (pair < num_pairs)
            blank_at = (pair // HEADS).to(tl.int64) * out_row_stride
            blank_at += (pair % HEADS) * out_head_stride
            zeros = tl.zeros([BLOCK_M, CHUNK], out.dtype.element_ty)
            for at in range(0, RANK, CHUNK):
                inside = blank[:, None] & (at + c < RANK)[None, :]
                tl.store(out + blank_at[:, None] + (at + c)[None, :], zeros, mask=inside)

    # A request's rows before its tree see no key, so that they become zeros.
    end = first_row + rows
    start = tl.maximum(start, end - MAX_ROWS)
    tile = tl.program_id(0) * BLOCK_M
    if tile >= (end - start) * HEADS:
        return
    n = tl.arange(0, BLOCK_N)
    exists = n < rows
    key = first_key + n
    page = tl.load(block_table + req * table_stride + key // BLOCK_SIZE, mask=exists, other=0)
    m = tile + tl.arange(0, BLOCK_M)
    row = start + m // HEADS
    head = m % HEADS
    written = row < end
    computed = written & (row >= first_row)
    r = tl.arange(0, ROPE_PAD)
    in_rope = r < ROPE
    rope_at = row * rope_row_stride + head * rope_head_stride
    rotated = computed[:, None] & in_rope[None, :]
    q_rope = tl.load(query_rope + rope_at[:, None] + r[None, :], mask=rotated, other=0.0)
    mask = tl.load(row_masks + row, mask=computed, other=0)
    # What the first pass leaves for a request without a prefix is not read.
    prefixed = computed & (first_key > 0)
    lse_at = head * lse_head_stride + row * lse_row_stride
    lse = tl.load(prefix_lse + lse_at, mask=prefixed, other=float("-inf"))
    key_at = page.to(tl.int64) * cache_block_stride + (key % BLOCK_SIZE) * cache_slot_stride
    keys = latents + key_at[:, None]
    k_rope = tl.load(keys + RANK + r[None, :], mask=exists[:, None] & in_rope[None, :], other=0.0)

    logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    queries = query + (row * query_row_stride + head * query_head_stride)[:, None]
    for at in tl.range(0, RANK, CHUNK, num_stages=STAGES):
        d = at + c
        in_rank = (d < RANK)[None, :]
        q = tl.load(queries + d[None, :], mask=computed[:, None] & in_rank, other=0.0)
        k = tl.load(keys + d[None, :], mask=exists[:, None] & in_rank, other=0.0)
        logits = tl.dot(q, tl.trans(k), logits, input_precision=PRECISION)
    logits = tl.dot(q_rope, tl.trans(k_rope), logits, input_precision=PRECISION)
    # Logits in units of log 2, for exp2.
    logits = logits * (scale * 1.4426950408889634)
    bit = (mask[:, None] >> n[None, :].to(tl.int64)) & 1
    logits = tl.where((bit != 0) & exists[None, :], logits, float("-inf"))
    weights, prefix_weight, total = merged_weights(logits, lse, None)
    total = tl.where(total > 0, total, 1.0)
    weights = weights.to(latents.dtype.element_ty)

    prefixes = prefix_out + (row * prefix_row_stride + head * prefix_head_stride)[:, None]
    outs = out + (row * out_row_stride + head * out_head_stride)[:, None]
    for at in tl.range(0, RANK, CHUNK, num_stages=STAGES):
        d = at + c
        in_rank = (d < RANK)[None, :]
        v = tl.load(keys + d[None, :], mask=exists[:, None] & in_rank, other=0.0)
        prefix = tl.load(prefixes + d[None, :], mask=prefixed[:, None] & in_rank, other=0.0)
        acc = tl.dot(weights, v, input_precision=PRECISION)
        acc = (acc + prefix.to(tl.float32) * prefix_weight[:, None]) / total[:, None]
        tl.store(outs + d[None, :], acc.to(out.dtype.element_ty), mask=written[:, None] & in_rank)


def attend_own_latents(
    batch: LatentBatch,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    out: torch.Tensor,
    *,
    tile: OwnTile | None = None,
) -> None:
    """The second of two passes over latents: a tree's own ones, then the merge.

    The partial softmaxes are merged by their log-sum-exp (flash-decoding, arXiv:2311.01282). The
    host reads no device value. Rows of no tree become zeros: those before a request's tree, and
    those behind the last request, which a graph has where fewer run than it was captured for.

    Args:
        batch: its latents have the dtype of its query, and ``max_rows`` bounds every query's rows.
        prefix_out: ``[num_tokens, num_heads, rank]``, the first pass's output, any floating dtype.
            Not read for a request without a prefix, nor for rows that belong to no tree.
        prefix_lse: f32 ``[num_heads, num_tokens]``, its log-sum-exp, natural logarithm.
        out: like the query. It may be `prefix_out` itself.
        tile: sizes of a program; None decides by the batch's sizes.
    """
    if batch.num_reqs == 0:
        out.zero_()
        return
    query, rope, latents, max_rows = batch.query, batch.query_rope, batch.latents, batch.max_rows
    num_tokens, num_heads, rank = query.shape
    rows = max_rows * num_heads
    tile = tile or own_tile(batch.num_reqs, rows, rank)
    own_latents_kernel[(cdiv(rows, tile.rows), batch.num_reqs)](
        query, rope, latents, prefix_out, prefix_lse, out, batch.query_start_loc, batch.prefix_lens,
        batch.block_table, batch.row_masks, batch.num_rows, batch.scale, batch.num_reqs,
        num_tokens * num_heads,
        *query.stride()[:2], *rope.stride()[:2], *prefix_out.stride()[:2], *prefix_lse.stride(),
        *out.stride()[:2], *latents.stride()[:2], batch.block_table.stride(0),
        HEADS=num_heads, RANK=rank, ROPE=rope.shape[2],
        ROPE_PAD=max(16, next_power_of_2(rope.shape[2])), BLOCK_SIZE=latents.shape[1],
        MAX_ROWS=max_rows, BLOCK_M=tile.rows, BLOCK_N=max(16, next_power_of_2(max_rows)),
        CHUNK=tile.chunk, STAGES=tile.stages,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=1,
    )  # fmt: skip

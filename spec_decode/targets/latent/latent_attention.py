"""Attention of tree and draft rows over latents (MLA in its absorbed form, arXiv:2405.04434)."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import functools

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.attention.attention_kernel import (
    _accumulate,
    _key_value_scales,
    _tree_rows,
)
from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace, Tile
from vllm_graft.spec_decode.kernels.attention.e4m3 import FP8, conversion, load_rows
from vllm_graft.spec_decode.kernels.attention.tree_attention import AttentionCall, partial_results
from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, cdiv, check_rows, next_power_of_2
from vllm_graft.spec_decode.trees.batch import LatentBatch, LatentDraftBatch


@Kernel
@triton.jit(do_not_specialize=["level", "num_splits", "ancestors_stride"])
def latent_kernel(
    query, query_rope, latents, out, partial_acc, partial_peak, partial_total, query_start_loc,
    prefix_lens, block_table, row_masks, num_rows, scratch, ancestors, k_scale, scale, level,
    num_splits, query_row_stride, query_head_stride, rope_row_stride, rope_head_stride,
    out_row_stride, out_head_stride, cache_block_stride, cache_slot_stride, table_stride,
    scratch_req_stride, scratch_slot_stride, ancestors_stride,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, PARTIAL_ROWS: tl.constexpr,
    TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DRAFT: tl.constexpr,
    TOPK: tl.constexpr, FP8: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile, of a request's rows x heads, over one split of its keys. A latent is loaded once as
    key and value. Rows to verify see keys of the cache alone. Rows of a draft's level see all keys
    of the cache and their ancestors in the scratch."""
    req = (tl.program_id(0) // TILES).to(tl.int64)
    split = tl.program_id(1)
    if DRAFT:
        rows = TOPK
        first_row = req * TOPK
    else:
        rows, first_row = _tree_rows(query_start_loc, num_rows, req, PARTIAL_ROWS)
    tile = (tl.program_id(0) % TILES) * BLOCK_M
    if tile >= rows * HEADS:
        return

    m = tile + tl.arange(0, BLOCK_M)
    inside = m < rows * HEADS
    row = m // HEADS
    head = m % HEADS
    d = tl.arange(0, RANK_PAD)
    in_rank = d < RANK
    r = tl.arange(0, ROPE_PAD)
    in_rope = r < ROPE
    element = inside[:, None] & in_rank[None, :]
    q_at = (first_row + row) * query_row_stride + head * query_head_stride
    q = tl.load(query + q_at[:, None] + d[None, :], mask=element, other=0.0)
    rope_at = (first_row + row) * rope_row_stride + head * rope_head_stride
    rotated = inside[:, None] & in_rope[None, :]
    q_rope = tl.load(query_rope + rope_at[:, None] + r[None, :], mask=rotated, other=0.0)
    if DRAFT:
        mask = tl.zeros([BLOCK_M], tl.int64)
    else:
        mask = tl.load(row_masks + first_row + row, mask=inside, other=0)
    acc = tl.zeros([BLOCK_M, RANK_PAD], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    logit_scale, value_scale = _key_value_scales(scale, k_scale, k_scale, FP8)
    # Logits in units of log 2, for exp2.
    logit_scale = logit_scale * 1.4426950408889634
    scratch_scale = scale * 1.4426950408889634

    own_first = tl.load(prefix_lens + req)
    kv_len = own_first
    if not DRAFT:
        kv_len += rows
    split_len = tl.cdiv(tl.cdiv(kv_len, num_splits), BLOCK_N) * BLOCK_N
    begin = split * split_len
    end = tl.minimum(begin + split_len, kv_len)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        exists = n < end
        page = tl.load(block_table + req * table_stride + n // BLOCK_SIZE, mask=exists, other=0)
        at = page.to(tl.int64) * cache_block_stride + (n % BLOCK_SIZE) * cache_slot_stride
        pointers = latents + at[:, None]
        k = load_rows(pointers + d[None, :], exists[:, None] & in_rank[None, :], q.dtype, FP8)
        k_rope = load_rows(
            pointers + RANK + r[None, :], exists[:, None] & in_rope[None, :], q.dtype, FP8
        )
        logits = _latent_logits(q, q_rope, k, k_rope, logit_scale, PRECISION)
        if start + BLOCK_N > own_first:
            own = n - own_first
            bit = (mask[:, None] >> tl.minimum(tl.maximum(own, 0), 63)[None, :].to(tl.int64)) & 1
            visible = (own < 0)[None, :] | ((bit != 0) & exists[None, :])
            logits = tl.where(visible, logits, float("-inf"))
        acc, peak, total = _accumulate(logits, k, acc, peak, total, PRECISION)
    acc = acc * value_scale

    if DRAFT:
        # All splits of a request have one scratch, which the last program computes. Where there are
        # splits, that program has no keys of the cache.
        slots = tl.where(split == tl.num_programs(1) - 1, (level + 1) * TOPK, 0)
        for start in range(0, slots, BLOCK_N):
            slot = start + tl.arange(0, BLOCK_N)
            exists = slot < slots
            pointers = scratch + (req * scratch_req_stride + slot * scratch_slot_stride)[:, None]
            k = load_rows(pointers + d[None, :], exists[:, None] & in_rank[None, :], q.dtype, False)
            k_rope = load_rows(
                pointers + RANK + r[None, :], exists[:, None] & in_rope[None, :], q.dtype, False
            )
            logits = _latent_logits(q, q_rope, k, k_rope, scratch_scale, PRECISION)
            ancestor = tl.load(
                ancestors + (first_row + row)[:, None] * ancestors_stride + (slot // TOPK)[None, :],
                mask=inside[:, None] & exists[None, :],
                other=-1,
            )
            logits = tl.where(ancestor == slot[None, :], logits, float("-inf"))
            acc, peak, total = _accumulate(logits, k, acc, peak, total, PRECISION)

    if SPLIT:
        place = ((req * tl.num_programs(1) + split) * PARTIAL_ROWS + row) * HEADS + head
        tl.store(partial_peak + place, peak, mask=inside)
        tl.store(partial_total + place, total, mask=inside)
        seen = element & (total > 0)[:, None]
        tl.store(partial_acc + place[:, None] * RANK + d[None, :], acc, mask=seen)
    else:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_at = (first_row + row) * out_row_stride + head * out_head_stride
        tl.store(out + out_at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=element)


@triton.jit
def _latent_logits(q, q_rope, k, k_rope, scale, PRECISION: tl.constexpr):
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    logits = tl.dot(q_rope, tl.trans(k_rope), logits, input_precision=PRECISION)
    return logits * scale


@Kernel
@triton.jit
def copy_rows_kernel(
    source, target, query_start_loc, num_rows,
    source_stride, target_stride,
    WIDTH: tl.constexpr, MAX_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one row of a tree; other rows of the target stay as they are."""
    req = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    rows, first_row = _tree_rows(query_start_loc, num_rows, req, MAX_ROWS)
    if row >= rows:
        return
    d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = d < WIDTH
    values = tl.load(source + (first_row + row) * source_stride + d, mask=inside)
    tl.store(target + (first_row + row) * target_stride + d, values, mask=inside)


_COPIED = 1024
"""Elements of a row that a program copies."""


@functools.cache
def latent_tile(
    rows: int, rank_pad: int, dtype: torch.dtype, *, mixed: bool, two_dtypes: bool = False
) -> Tile:
    """Rows and keys of a program, so that its accumulator fits its registers.

    Args:
        rows: query rows of a request, times heads.
        rank_pad: elements of a latent, padded.
        mixed: whether most requests have far fewer rows, so that most of a large tile were empty.
        two_dtypes: whether cached latents are in FP8 and those of a draft's levels in 16 bits.
            Their tiles do not share memory, which for 64 rows sm_80 has too little of.
    """
    rows = max(16, next_power_of_2(rows))
    if dtype == torch.float32:
        return Tile(16, 16, 4, 1)
    rows = min(rows, 32 if mixed or two_dtypes else 64)
    return Tile(rows, 32, 8 if rows * rank_pad > 32 * 512 else 4, 2)


class _Call(AttentionCall):
    def most_keys(self) -> int:
        return int(self.max_seq_len)

    def check(self, out: torch.Tensor) -> None:
        query, rope, latents = self.query, self.query_rope, self.latents
        width = query.shape[2] + rope.shape[2]
        if latents.dim() != 3 or latents.shape[2] != width or rope.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"queries of {tuple(query.shape)} and {tuple(rope.shape)} do not fit latents of "
                f"{tuple(latents.shape)}"
            )
        if rope.dtype != query.dtype or latents.dtype not in (query.dtype, *FP8):
            raise ValueError(
                f"the latents have dtype {latents.dtype}, the queries {query.dtype} and "
                f"{rope.dtype}: they must be equal unless the latents are e4m3"
            )
        check_rows(query, rope, latents, out)


def latent_attention(
    batch: LatentBatch | LatentDraftBatch,
    out: torch.Tensor,
    *,
    workspace: AttentionWorkspace | None = None,
    num_splits: int | None = None,
) -> None:
    """Attention of the last ``num_rows[r]`` rows of each request's query, or of a level's frontier
    in a draft whose scratch holds the level's own latents already, as weighted latents.

    The host reads no device value, so the call can be captured; sizes in a graph are upper bounds.
    Raises `ValueError` if shapes, dtypes or strides don't match. `out`: ``[num_tokens, num_heads,
    rank]``, dtype of the query; other rows stay untouched. `workspace`: receives partial results;
    None means one split, unless `num_splits` forces more."""
    own = {"max_rows": batch.topk} if isinstance(batch, LatentDraftBatch) else {}
    call = _Call(batch, **own)
    call.check(out)
    if call.num_reqs == 0:
        return
    query, latents, scratch = call.query, call.latents, call.scratch
    num_heads, rank = query.shape[1:]
    rope = call.query_rope.shape[2]
    rank_pad = call.head_pad
    rows = call.max_rows * num_heads
    fp8 = conversion(latents, query.dtype)
    two_dtypes = fp8 > 0 and scratch is not None
    tile = latent_tile(rows, rank_pad, query.dtype, mixed=call.mixed, two_dtypes=two_dtypes)
    tiles = cdiv(rows, tile.rows)
    splits = call.num_splits(tiles, workspace, num_splits)
    latent_kernel[(call.num_reqs * tiles, call.parts(splits))](
        query, call.query_rope, latents.view(torch.uint8) if fp8 else latents, out,
        *partial_results(workspace), call.query_start_loc, call.prefix_lens, call.block_table,
        call.row_masks, call.num_rows, scratch, call.ancestors, call.k_scale, call.scale,
        call.level, splits,
        *query.stride()[:2], *call.query_rope.stride()[:2], *out.stride()[:2],
        *latents.stride()[:2], call.block_table.stride(0),
        *(scratch.stride()[:2] if scratch is not None else (0, 0)),
        # Trees of all depths share the compiled kernel.
        call.ancestors.stride(1) if call.ancestors is not None else 0,
        **call.shared(), RANK=rank, RANK_PAD=rank_pad, ROPE=rope,
        ROPE_PAD=max(16, next_power_of_2(rope)), BLOCK_SIZE=latents.shape[1], TILES=tiles,
        BLOCK_M=tile.rows, BLOCK_N=tile.keys, FP8=fp8, SPLIT=splits > 1,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    # All splits of a row are held at once.
    call.combine(out, workspace, splits, warps=8 if rank_pad > 256 else 4)


def copy_tree_rows(source: torch.Tensor, target: torch.Tensor, batch: LatentBatch) -> None:
    """Copy the rows of a batch's trees between tensors ``[>= num_tokens, width]`` of one dtype.
    Other rows of the target stay untouched. The host reads no device value."""
    width = source.shape[1]
    copy_rows_kernel[(batch.num_reqs, batch.max_rows, cdiv(width, _COPIED))](
        source, target, batch.query_start_loc, batch.num_rows,
        source.stride(0), target.stride(0),
        WIDTH=width, MAX_ROWS=batch.max_rows, BLOCK=_COPIED, num_warps=4,
    )  # fmt: skip

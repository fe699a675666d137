"""Attention of tree rows over the tree's own keys, merged with attention over the prefix."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.attention.attention_kernel import (
    _key_value_scales,
    _logits,
    _tree_rows,
)
from vllm_graft.spec_decode.kernels.attention.e4m3 import conversion, load_rows
from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, cdiv, next_power_of_2
from vllm_graft.spec_decode.trees.batch import TreeBatch

# Few rows per program: with one tile of keys, what counts is how many loads run at once.
_TILE = 32


@triton.jit
def merged_weights(logits, lse, sink):
    """Weights of a tree's own keys and of the prefix, and their sum, which a sink adds to. Rows
    that see no key have weights of 0, no NaN. `logits` are in units of log 2; `lse` (the prefix's
    log-sum-exp, -inf without one) and `sink` (a logit without a value, or None) are natural."""
    prefix_peak = lse * 1.4426950408889634
    top = tl.maximum(tl.max(logits, 1), prefix_peak)
    if sink is not None:
        sink = sink * 1.4426950408889634
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(logits - base[:, None])
    prefix_weight = tl.exp2(prefix_peak - base)
    total = tl.sum(weights, 1) + prefix_weight
    if sink is not None:
        total += tl.exp2(sink - base)
    return weights, prefix_weight, total


@Kernel
@triton.jit(do_not_specialize=["soft_cap", "lse_head_stride"])
def own_rows_kernel(
    query, kv_cache, prefix_out, prefix_lse, out,
    query_start_loc, seq_lens, block_table, row_masks, num_rows,
    q_scale, k_scale, v_scale, sinks, scale, soft_cap,
    query_row_stride, query_head_stride, prefix_row_stride, prefix_head_stride,
    lse_head_stride, lse_row_stride, out_row_stride, out_head_stride,
    cache_block_stride, cache_head_stride, cache_slot_stride, table_stride,
    GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MAX_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FP8: tl.constexpr,
    FP8_QUERY: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile, of a request's rows x the heads of one KV head."""
    tile = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    req = tl.program_id(2).to(tl.int64)
    # There are few programs with little work, so loads that wait for one another take the time.
    # Hence there are three rounds of loads only: lengths, what they point to, keys.
    kv_len = tl.load(seq_lens + req)
    rows, first_row = _tree_rows(query_start_loc, num_rows, req, MAX_ROWS)
    if tile >= rows * GROUP:
        return
    first_key = kv_len - rows

    n = tl.arange(0, BLOCK_N)
    exists = n < rows
    key = first_key + n
    page = tl.load(block_table + req * table_stride + key // BLOCK_SIZE, mask=exists, other=0)
    m = tile + tl.arange(0, BLOCK_M)
    inside = m < rows * GROUP
    row = first_row + m // GROUP
    q_head = head * GROUP + m % GROUP
    d = tl.arange(0, HEAD_PAD)
    in_head = d < HEAD
    element = inside[:, None] & in_head[None, :]
    computed = out.dtype.element_ty
    q_at = row * query_row_stride + q_head * query_head_stride
    q = load_rows(query + q_at[:, None] + d[None, :], element, computed, FP8_QUERY)
    mask = tl.load(row_masks + row, mask=inside, other=0)
    # What FlashAttention leaves for a request without a prefix is not read.
    has_prefix = first_key > 0
    lse_at = q_head * lse_head_stride + row * lse_row_stride
    lse = tl.load(prefix_lse + lse_at, mask=inside & has_prefix, other=float("-inf"))
    prefix_at = row * prefix_row_stride + q_head * prefix_head_stride
    prefix = tl.load(
        prefix_out + prefix_at[:, None] + d[None, :], mask=element & has_prefix, other=0.0
    )
    at = page.to(tl.int64) * cache_block_stride + head * cache_head_stride
    at += (key % BLOCK_SIZE) * cache_slot_stride
    loaded = exists[:, None] & in_head[None, :]
    pointers = kv_cache + at[:, None] + d[None, :]
    k = load_rows(pointers, loaded, computed, FP8)
    v = load_rows(pointers + HEAD, loaded, computed, FP8)

    logit_scale = scale
    if FP8_QUERY:  # noqa: SIM102  Triton decides each when it compiles the kernel.
        if q_scale is not None:
            logit_scale = logit_scale * tl.load(q_scale)
    logit_scale, value_scale = _key_value_scales(logit_scale, k_scale, v_scale, FP8)
    logits = _logits(q, k, logit_scale, soft_cap, HAS_CAP, PRECISION)
    bit = (mask[:, None] >> n[None, :].to(tl.int64)) & 1
    logits = tl.where((bit != 0) & exists[None, :], logits, float("-inf"))

    sink = None
    if sinks is not None:
        # A sink is a logit without a value, which the first pass has not counted.
        sink = tl.load(sinks + q_head, mask=inside, other=float("-inf")).to(tl.float32)
    weights, prefix_weight, total = merged_weights(logits, lse, sink)
    acc = tl.dot(weights.to(computed), v, input_precision=PRECISION) * value_scale
    acc += prefix.to(tl.float32) * prefix_weight[:, None]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_at = row * out_row_stride + q_head * out_head_stride
    tl.store(out + out_at[:, None] + d[None, :], acc.to(computed), mask=element)


def attend_own_rows(
    batch: TreeBatch, prefix_out: torch.Tensor, prefix_lse: torch.Tensor, out: torch.Tensor
) -> None:
    """The second of two passes: the last ``num_rows[r]`` keys of a request, then the merge.

    The partial softmaxes are merged by their log-sum-exp (flash-decoding, arXiv:2311.01282). The
    result equals that of `tree_attention` if the first pass saw each request's other keys. No
    device value is read on the host.

    Args:
        batch: its query has the dtype of ``out``, or is e4m3.
        prefix_out: ``[num_tokens, num_heads, head_size]``, the first pass's output, any floating
            dtype. Not read for a request without a prefix.
        prefix_lse: f32 ``[num_heads, num_tokens]``, its log-sum-exp, natural logarithm.
        out: bf16, fp16 or fp32; rows that are not computed stay untouched.
    """
    if batch.num_reqs == 0:
        return
    query, kv_cache, max_rows = batch.query, batch.kv_cache, batch.max_rows
    num_heads, head_size = query.shape[1:]
    kv_heads, block_size = kv_cache.shape[1:3]
    group = num_heads // kv_heads
    fp8, fp8_query = (conversion(each, out.dtype) for each in (kv_cache, query))
    block_m = min(_TILE, max(16, next_power_of_2(max_rows * group)))
    own_rows_kernel[(cdiv(max_rows * group, block_m), kv_heads, batch.num_reqs)](
        query.view(torch.uint8) if fp8_query else query,
        kv_cache.view(torch.uint8) if fp8 else kv_cache, prefix_out, prefix_lse, out,
        batch.query_start_loc, batch.seq_lens, batch.block_table, batch.row_masks, batch.num_rows,
        batch.q_scale, batch.k_scale, batch.v_scale, batch.sinks, batch.scale, batch.soft_cap,
        *query.stride()[:2], *prefix_out.stride()[:2], *prefix_lse.stride(), *out.stride()[:2],
        *kv_cache.stride()[:3], batch.block_table.stride(0),
        GROUP=group, HEAD=head_size, HEAD_PAD=max(16, next_power_of_2(head_size)),
        BLOCK_SIZE=block_size, MAX_ROWS=max_rows, BLOCK_M=block_m,
        BLOCK_N=max(16, next_power_of_2(max_rows)), FP8=fp8, FP8_QUERY=fp8_query,
        HAS_CAP=batch.soft_cap > 0, PRECISION="ieee" if out.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=1,
    )  # fmt: skip

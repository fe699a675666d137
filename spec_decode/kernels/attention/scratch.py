"""The draft's K/V of tree nodes: dense, outside the paged cache."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.sizes import next_power_of_2


@triton.jit(do_not_specialize=["level"])
def _scratch_kernel(
    key,
    value,
    scratch,
    level,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    scratch_req_stride,
    scratch_slot_stride,
    scratch_head_stride,
    TOPK: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, HEAD_PAD)
    inside = d < HEAD
    k = tl.load(key + row * key_row_stride + head * key_head_stride + d, mask=inside)
    v = tl.load(value + row * value_row_stride + head * value_head_stride + d, mask=inside)
    slot = level * TOPK + row % TOPK
    at = row // TOPK * scratch_req_stride + slot * scratch_slot_stride + head * scratch_head_stride
    tl.store(scratch + at + d, k, mask=inside)
    tl.store(scratch + at + HEAD + d, v, mask=inside)


def write_scratch(
    key: torch.Tensor,
    value: torch.Tensor,
    scratch_kv: torch.Tensor,
    level: int,
    num_reqs: int,
    topk: int,
) -> None:
    """Store the K/V of a level's frontier at scratch slots ``level * topk .. + topk - 1``.

    Args:
        key: ``[num_reqs * topk, kv_heads, head_size]``, last dimension contiguous.
        value: Like ``key``.
        scratch_kv: ``[max_reqs, steps * topk, kv_heads, 2 * head_size]``, K before V, dtype of
            ``key``.
        level: Level of the frontier.
        num_reqs: Batch rows.
        topk: Frontier nodes per batch row.
    """
    if num_reqs == 0:
        return
    heads, head_size = key.shape[1:]
    _scratch_kernel[(num_reqs * topk, heads)](
        key,
        value,
        scratch_kv,
        level,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        scratch_kv.stride(0),
        scratch_kv.stride(1),
        scratch_kv.stride(2),
        TOPK=topk,
        HEAD=head_size,
        HEAD_PAD=next_power_of_2(head_size),
        num_warps=1,
    )

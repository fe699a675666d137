"""The draft's K/V of tree nodes: dense, outside the paged cache."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import next_power_of_2


@Kernel
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
    KEY: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, KEY_PAD)
    in_key = d < KEY
    e = tl.arange(0, VALUE_PAD)
    in_value = e < VALUE
    k = tl.load(key + row * key_row_stride + head * key_head_stride + d, mask=in_key)
    v = tl.load(value + row * value_row_stride + head * value_head_stride + e, mask=in_value)
    slot = level * TOPK + row % TOPK
    at = row // TOPK * scratch_req_stride + slot * scratch_slot_stride + head * scratch_head_stride
    tl.store(scratch + at + d, k, mask=in_key)
    tl.store(scratch + at + KEY + e, v, mask=in_value)


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
        key: ``[num_reqs * topk, kv_heads, key_size]``, last dimension contiguous. With MLA it is
            the latent, of one head.
        value: Likewise, ``[num_reqs * topk, kv_heads, value_size]``. With MLA it is the rotated
            part of the key.
        scratch_kv: ``[max_reqs, steps * topk, kv_heads, key_size + value_size]``, ``key`` before
            ``value``, dtype of ``key``.
        level: Level of the frontier.
        num_reqs: Batch rows.
        topk: Frontier nodes per batch row.
    """
    if num_reqs == 0:
        return
    heads, key_size = key.shape[1:]
    value_size = value.shape[2]
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
        KEY=key_size,
        KEY_PAD=next_power_of_2(key_size),
        VALUE=value_size,
        VALUE_PAD=next_power_of_2(max(value_size, 1)),
        num_warps=1,
    )

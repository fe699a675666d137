"""A kernel for the gate of a SwiGLU."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Columns per program."""


@triton.jit
def _silu_mul_kernel(
    x_ptr, out_ptr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    gate = tl.load(x_ptr + row * (2 * WIDTH) + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * WIDTH) + WIDTH + column, mask=live, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * STRIDE + column, value, mask=column < STRIDE)


def silu_mul(gate_up: torch.Tensor, stride: int) -> torch.Tensor:
    """``silu(gate) * up``.

    Args:
        gate_up: ``[..., 2 * width]``, contiguous.
        stride: columns per row of the result, at least `width`. With a multiple of 8 the next
            matrix product can read 16 bytes at a time.

    Returns:
        ``[..., stride]``; columns beyond `width` are zero.
    """
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], stride)
    rows = gate_up.numel() // (2 * width)
    _silu_mul_kernel[(rows, triton.cdiv(stride, BLOCK))](
        gate_up, out, WIDTH=width, STRIDE=stride, BLOCK=BLOCK, num_warps=4
    )
    return out

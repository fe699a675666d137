"""Kernels for the gate of a SwiGLU, and for the rotary embedding of queries and keys."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Columns per program."""


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    gate = tl.load(x_ptr + row * (2 * WIDTH) + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * (2 * WIDTH) + WIDTH + column, mask=live, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * WIDTH + column, value, mask=live)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[..., 2 * width]``, contiguous: ``[..., width]``."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    rows = out.numel() // width
    grid = (rows, triton.cdiv(width, BLOCK))
    _silu_mul_kernel[grid](gate_up, out, WIDTH=width, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit(do_not_specialize=["rows"])
def _rotate_kernel(
    qkv_ptr, cos_ptr, sin_ptr, out_ptr, rows, qkv_stride,
    HEADS: tl.constexpr, SIZE: tl.constexpr, HEADS_PAD: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    head = tl.arange(0, HEADS_PAD)[:, None]
    column = tl.arange(0, HALF_PAD)
    live = column < SIZE // 2
    mask = (head < HEADS) & live[None, :]
    cos = tl.load(cos_ptr + row * (SIZE // 2) + column, mask=live, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * (SIZE // 2) + column, mask=live, other=0.0).to(tl.float32)
    source = qkv_ptr + row * qkv_stride + part * HEADS * SIZE + head * SIZE + column[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + SIZE // 2, mask=mask, other=0.0).to(tl.float32)
    left = first * cos[None, :] - second * sin[None, :]
    right = first * sin[None, :] + second * cos[None, :]
    target = out_ptr + (part.to(tl.int64) * rows + row) * (HEADS * SIZE) + head * SIZE
    target += column[None, :]
    tl.store(target, left, mask=mask)
    tl.store(target + SIZE // 2, right, mask=mask)


def rotate_qk(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotate queries and keys by halves, as GPT-NeoX does: ``[2, rows, heads, size]``. `qkv` is
    ``[rows, 3 * heads * size]``, `cos` and `sin` ``[rows, size / 2]`` of its dtype, contiguous."""
    rows, size = qkv.shape[0], qkv.shape[1] // (3 * heads)
    out = qkv.new_empty(2, rows, heads, size)
    _rotate_kernel[(rows, 2)](
        qkv, cos, sin, out, rows, qkv.stride(0),
        HEADS=heads, SIZE=size, HEADS_PAD=triton.next_power_of_2(heads),
        HALF_PAD=triton.next_power_of_2(size // 2), num_warps=4,
    )  # fmt: skip
    return out

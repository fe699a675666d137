"""Kernels for LayerNorm and RMSNorm of a sum, with the bits of the operators that they replace.

A sum of many floating-point numbers depends on the order of its terms, so these kernels add in the
same order as torch's. `layer_norm` uses Welford's algorithm over 128 threads with four neighbouring
columns each (``aten/src/ATen/native/cuda/layer_norm_kernel.cu``). `mean` uses one warp with four
sums per thread (``Reduce.cuh``). Multiplications and additions are contracted only where the
compiler contracts torch's. `bit_check` compares the bits before any of these kernels is used."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl

THREADS = 128
"""Threads per row of a LayerNorm."""

MOST_COLUMNS = 12 * THREADS
"""The widest row that the LayerNorm kernel takes."""

NO_FUSION: dict[str, Any] = {"enable_fp_fusion": False}
"""Compiler options: only the multiply-adds written as `fma` are contracted."""

FEWEST_ROWS = 16
"""The fewest rows that the RMSNorm kernel takes: with fewer, torch splits a row among warps."""


@triton.jit
def _combined(mean, square, count, other_mean, other_square, other_count):
    """Merge Welford's statistics of two parts; the second is that of the higher threads."""
    delta = mean - other_mean
    total = other_count + count
    # Threads beyond the end of a narrow row have a count of zero.
    share = tl.where(total > 0, tl.math.div_rn(1.0, total), 0.0)
    far, near = other_count * share, count * share
    mean = tl.fma(far, other_mean, near * mean)
    square = tl.fma(delta * delta * other_count, near, other_square + square)
    return mean, square, total


@triton.jit
def _added(value, mean, square, number, live):
    delta = value - mean
    new_mean = tl.fma(delta, 1.0 / number, mean)
    new_square = tl.fma(delta, value - new_mean, square)
    return tl.where(live, new_mean, mean), tl.where(live, new_square, square)


@triton.jit
def _four(block, THREADS: tl.constexpr):
    """The four columns of a block ``[THREADS, 4]``."""
    even, odd = tl.split(tl.reshape(block, (THREADS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _with_block(block, mean, square, count, step: tl.constexpr, live, THREADS: tl.constexpr):
    """Add four values per thread to Welford's statistics."""
    first, second, third, fourth = _four(block, THREADS)
    mean, square = _added(first, mean, square, 4 * step + 1, live)
    mean, square = _added(second, mean, square, 4 * step + 2, live)
    mean, square = _added(third, mean, square, 4 * step + 3, live)
    mean, square = _added(fourth, mean, square, 4 * step + 4, live)
    return mean, square, tl.where(live, 4.0 * (step + 1), count)


@triton.jit
def _loaded(x_ptr, residual_ptr, row, columns, live, WIDTH: tl.constexpr, ROUND: tl.constexpr):
    """``x + residual`` in float32; with `ROUND`, rounded to their dtype."""
    place = row * WIDTH + columns
    block = tl.load(x_ptr + place, mask=live, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        block += tl.load(residual_ptr + place, mask=live, other=0.0).to(tl.float32)
        if ROUND:
            block = block.to(x_ptr.dtype.element_ty).to(tl.float32)
    return block


@triton.jit
def _layer_norm_store(
    block, mean, scale, weight, bias, residual_ptr, sum_ptr, out_ptr, place, live
):
    normed = tl.fma(weight.to(tl.float32), scale * (block - mean), bias.to(tl.float32))
    tl.store(out_ptr + place, normed, mask=live)
    if residual_ptr is not None:
        tl.store(sum_ptr + place, block, mask=live)


@triton.jit
def _layer_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, sum_ptr, out_ptr, eps,
    WIDTH: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    # The three steps are written out, so that all loads fly at once and values stay in registers.
    row = tl.program_id(0).to(tl.int64)
    thread = tl.arange(0, THREADS)
    columns0 = thread[:, None] * 4 + tl.arange(0, 4)[None, :]
    columns1, columns2 = columns0 + 4 * THREADS, columns0 + 8 * THREADS
    live0, live1, live2 = columns0 < WIDTH, columns1 < WIDTH, columns2 < WIDTH
    block0 = _loaded(x_ptr, residual_ptr, row, columns0, live0, WIDTH, True)
    block1 = _loaded(x_ptr, residual_ptr, row, columns1, live1, WIDTH, True)
    block2 = _loaded(x_ptr, residual_ptr, row, columns2, live2, WIDTH, True)
    weight0 = tl.load(weight_ptr + columns0, mask=live0, other=0.0)
    weight1 = tl.load(weight_ptr + columns1, mask=live1, other=0.0)
    weight2 = tl.load(weight_ptr + columns2, mask=live2, other=0.0)
    bias0 = tl.load(bias_ptr + columns0, mask=live0, other=0.0)
    bias1 = tl.load(bias_ptr + columns1, mask=live1, other=0.0)
    bias2 = tl.load(bias_ptr + columns2, mask=live2, other=0.0)
    mean = tl.zeros((THREADS,), tl.float32)
    square = tl.zeros((THREADS,), tl.float32)
    count = tl.zeros((THREADS,), tl.float32)
    vectors: tl.constexpr = WIDTH // 4
    mean, square, count = _with_block(block0, mean, square, count, 0, thread < vectors, THREADS)
    mean, square, count = _with_block(
        block1, mean, square, count, 1, THREADS + thread < vectors, THREADS
    )
    mean, square, count = _with_block(
        block2, mean, square, count, 2, 2 * THREADS + thread < vectors, THREADS
    )
    mean, square, count = tl.reduce((mean, square, count), 0, _combined)
    scale = tl.rsqrt(tl.math.div_rn(square, 1.0 * WIDTH) + eps)
    start = row * WIDTH
    _layer_norm_store(
        block0, mean, scale, weight0, bias0, residual_ptr, sum_ptr, out_ptr, start + columns0, live0
    )
    _layer_norm_store(
        block1, mean, scale, weight1, bias1, residual_ptr, sum_ptr, out_ptr, start + columns1, live1
    )
    _layer_norm_store(
        block2, mean, scale, weight2, bias2, residual_ptr, sum_ptr, out_ptr, start + columns2, live2
    )


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, eps, share,
    ROUND: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first_columns = tl.arange(0, 32)[:, None] * 4 + tl.arange(0, 4)[None, :]
    sums = tl.zeros((32, 4), tl.float32)
    # This loop stores nothing, as a store delays the loads that follow it.
    for step in tl.static_range(WIDTH // 128):
        columns = step * 128 + first_columns
        value = _loaded(x_ptr, residual_ptr, row, columns, columns < WIDTH, WIDTH, ROUND)
        sums += value * value
    first, second, third, fourth = _four(sums, 32)
    total = tl.sum(((first + second) + third) + fourth, 0)
    scale = tl.rsqrt(total * share + eps)
    dtype = out_ptr.dtype.element_ty
    for step in tl.static_range(WIDTH // 128):
        columns = step * 128 + first_columns
        value = _loaded(x_ptr, residual_ptr, row, columns, columns < WIDTH, WIDTH, ROUND)
        weight = tl.load(weight_ptr + columns).to(tl.float32)
        normed = (value * scale).to(dtype).to(tl.float32) * weight
        tl.store(out_ptr + row * WIDTH + columns, normed)
        if residual_ptr is not None:
            tl.store(sum_ptr + row * WIDTH + columns, value)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``layer_norm(x + residual)`` and the sum rounded to its dtype, ``[..., width]`` each. `x` is
    contiguous; width is a multiple of 4 and at most `MOST_COLUMNS`. `residual` is a tensor like
    `x`, or None to normalise `x` itself, which is then the sum. `weight` and `bias` are
    ``[width]``, of x's dtype."""
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    width = x.shape[-1]
    _layer_norm_kernel[(x.numel() // width,)](
        x, residual, weight, bias, total, out, eps,
        WIDTH=width, THREADS=THREADS, num_warps=THREADS // 32, **NO_FUSION,
    )  # fmt: skip
    return out, total


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rms_norm(x + residual)`` and the sum, ``[..., width]`` each. As `add_layer_norm`, with at
    least `FEWEST_ROWS` rows and a width that is a multiple of 128. With `rounded`, the sum is
    rounded to its dtype before it is normalised."""
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    width = x.shape[-1]
    _rms_norm_kernel[(x.numel() // width,)](
        x, residual, weight, total, out, eps, 1.0 / width,
        ROUND=rounded, WIDTH=width, num_warps=1, **NO_FUSION,
    )  # fmt: skip
    return out, total

"""A skinny product in Triton: weights that its first steps need come to L2 before the wait.

The work is a line of steps: all steps of the first tile of weights, then those of the second. Each
program takes an equal share of the line (Stream-K, arXiv:2301.03598). A tile that several programs
share is summed up by the one that arrives last, always in the same order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel

PREFETCH = tl.constexpr("{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }")
"""PTX that lets L2 load $2 bytes from $1 on, and waits for nothing."""


@triton.jit
def _fetch(
    weight, first, end, steps, depth, TILE: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr
):
    """Let L2 load the weights of COUNT steps; steps from `end` on are not loaded."""
    each = tl.arange(0, COUNT * TILE)
    step = tl.minimum(first + each // TILE, end - 1)
    row = (step // steps) * TILE + each % TILE
    place = weight + row.to(tl.int64) * depth + (step % steps) * STEP
    size = tl.full([COUNT * TILE], STEP * 2, tl.int32)
    tl.inline_asm_elementwise(
        PREFETCH, "=r,l,r", [place.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _finish(
    total, out, partial, arrived, tile, steps, share, rows, columns, ROWS: tl.constexpr,
    TILE: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Write the sums of a program's steps of a tile; the last program of the tile adds up all."""
    column, row = tl.arange(0, TILE), tl.arange(0, ROWS)
    if FLIP:
        column, row = column[:, None], row[None, :]
    else:
        column, row = column[None, :], row[:, None]
    place = out + row.to(tl.int64) * columns + tile * TILE + column
    mask = row < rows
    begin = tile * steps
    first, last = begin // share, (begin + steps - 1) // share
    if first == last:
        tl.store(place, total.to(tl.bfloat16), mask=mask)
    else:
        program = tl.program_id(0)
        within = row * TILE + column
        # A program has two partial tiles at most: the one it begins in, and the one it ends in.
        slot = 2 * program + (program * share < begin).to(tl.int32)
        tl.store(partial + slot.to(tl.int64) * (ROWS * TILE) + within, total)
        # All threads have written before one of them says so.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if before == last - first:
            tl.debug_barrier()
            summed = tl.zeros_like(total)
            for other in range(first, last + 1):
                slot = 2 * other + (other * share < begin).to(tl.int32)
                part = partial + slot.to(tl.int64) * (ROWS * TILE) + within
                # L1 may hold what an earlier kernel had written there.
                summed += tl.load(part, cache_modifier=".cg")
            tl.store(place, summed.to(tl.bfloat16), mask=mask)
            tl.store(arrived + tile, 0)


@Kernel
@triton.jit(do_not_specialize=["rows", "share"])
def tile_product(
    x, weight, out, partial, arrived, rows, columns, depth, share, ROWS: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, FLIP: tl.constexpr, OVERLAPPED: tl.constexpr,
    EARLY: tl.constexpr, AHEAD: tl.constexpr, ROLL: tl.constexpr,
):  # fmt: skip
    """One program's share of the steps of ``out = x weight^T``.

    ``x`` is ``[rows, depth]``, ``weight`` is ``[columns, depth]``, all in bfloat16. With FLIP the
    tile of weights is the first operand, whose rows tensor cores take 64 at a time. `partial` is
    float32, two tiles for each program; `arrived` is int32, zero for each tile, before and after.
    """
    if OVERLAPPED and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    steps = depth // STEP
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, columns // TILE * steps)
    if OVERLAPPED:
        if AHEAD > 0:
            # Weights are nobody's output: they may be loaded before the kernel before has ended.
            _fetch(weight, begin, end, steps, depth, TILE, STEP, AHEAD)
        tl.extra.cuda.gdc_wait()
    inner = tl.arange(0, STEP)
    column = tl.arange(0, TILE)
    row = tl.arange(0, ROWS)
    # Triton pipelines innermost loops alone: one for each tile of the share.
    while begin < end:
        tile = begin // steps
        last = tl.minimum(end, (tile + 1) * steps)
        line = weight + (tile * TILE + column).to(tl.int64)[:, None] * depth + inner[None, :]
        total = tl.zeros([TILE, ROWS], tl.float32) if FLIP else tl.zeros([ROWS, TILE], tl.float32)
        for step in tl.range(begin - tile * steps, last - tile * steps):
            first = step * STEP
            weights = tl.load(line + first)
            if ROLL:
                next_step = tile * steps + step + AHEAD
                if next_step < end:
                    _fetch(weight, next_step, end, steps, depth, TILE, STEP, 1)
            if FLIP:
                values = tl.load(
                    x + row[None, :] * depth + first + inner[:, None],
                    mask=row[None, :] < rows, other=0.0,
                )  # fmt: skip
                total = tl.dot(weights, values, total)
            else:
                values = tl.load(
                    x + row[:, None] * depth + first + inner[None, :],
                    mask=row[:, None] < rows, other=0.0,
                )  # fmt: skip
                total = tl.dot(values, tl.trans(weights), total)
        _finish(total, out, partial, arrived, tile, steps, share, rows, columns, ROWS, TILE, FLIP)
        begin = last

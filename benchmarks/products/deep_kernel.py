"""A skinny product in Gluon: its stages in shared memory are filled with weights before the wait.

Triton's own pipeline begins where the loop stands, after the wait. Here the copies of the first
steps' weights are begun by hand, then the kernel waits for its predecessor, and then begins the
copies of the activations. The share of a program, and how tiles are summed up, are those of
`tile_kernel`. Copies are those of ``cp.async``; tensor cores read both operands from shared memory.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from vllm_graft.spec_decode.kernels.listed_launch import Kernel

# Triton 3.6 has them by these names, Triton 3.9 by others.
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

PREFETCH = gl.constexpr("{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }")
"""PTX that lets L2 load $2 bytes from $1 on, and waits for nothing."""


@gluon.jit
def _copy_weights(
    stage, weight, step, steps, depth, TILE: gl.constexpr, STEP: gl.constexpr, spread: gl.constexpr
):
    """Begin to copy the weights of a step into a stage."""
    tile = step // steps
    column = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, spread))
    inner = (step - tile * steps) * STEP + gl.arange(0, STEP, gl.SliceLayout(0, spread))
    place = weight + column.to(gl.int64)[:, None] * depth + inner[None, :]
    copy(stage, place)


@gluon.jit
def _copy_rows(
    stage, x, step, steps, rows, depth, ROWS: gl.constexpr, STEP: gl.constexpr,
    spread: gl.constexpr,
):  # fmt: skip
    """Begin to copy the activations of a step into a stage."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, spread))
    inner = (step % steps) * STEP + gl.arange(0, STEP, gl.SliceLayout(0, spread))
    # Rows that do not exist are copies of the last one, and are not written.
    row = gl.minimum(row, rows - 1)
    copy(stage, x + row[:, None] * depth + inner[None, :])


@gluon.jit
def _fetch(
    weight, first, end, steps, depth, TILE: gl.constexpr, STEP: gl.constexpr,
    COUNT: gl.constexpr, line: gl.constexpr,
):  # fmt: skip
    """Let L2 load the weights of COUNT steps; steps from `end` on are not loaded."""
    each = gl.arange(0, COUNT * TILE, line)
    step = gl.minimum(first + each // TILE, end - 1)
    row = (step // steps) * TILE + each % TILE
    place = weight + row.to(gl.int64) * depth + (step % steps) * STEP
    size = gl.full([COUNT * TILE], STEP * 2, gl.int32, line)
    gl.inline_asm_elementwise(
        PREFETCH, "=r,l,r", [place.to(gl.int64), size], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _finish(
    total, out, partial, arrived, tile, steps, share, rows, columns, ROWS: gl.constexpr,
    TILE: gl.constexpr, sums: gl.constexpr,
):  # fmt: skip
    """Write the sums of a program's steps of a tile; the last program of the tile adds up all."""
    column = gl.arange(0, TILE, gl.SliceLayout(1, sums))[:, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, sums))[None, :]
    place = out + row.to(gl.int64) * columns + tile * TILE + column
    mask = (row < rows) & (column < TILE)
    begin = tile * steps
    first, last = begin // share, (begin + steps - 1) // share
    if first == last:
        gl.store(place, total.to(gl.bfloat16), mask=mask)
    else:
        program = gl.program_id(0)
        within = row * TILE + column
        # A program has two partial tiles at most: the one it begins in, and the one it ends in.
        slot = 2 * program + (program * share < begin).to(gl.int32)
        gl.store(partial + slot.to(gl.int64) * (ROWS * TILE) + within, total)
        # All threads have written before one of them says so.
        barrier()
        before = gl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if before == last - first:
            barrier()
            summed = gl.full([TILE, ROWS], 0.0, gl.float32, sums)
            for other in range(first, last + 1):
                slot = 2 * other + (other * share < begin).to(gl.int32)
                part = partial + slot.to(gl.int64) * (ROWS * TILE) + within
                # L1 may hold what an earlier kernel had written there.
                summed += gl.load(part, cache_modifier=".cg")
            gl.store(place, summed.to(gl.bfloat16), mask=mask)
            gl.store(arrived + tile, 0)


@Kernel
@gluon.jit(do_not_specialize=["rows", "share"])
def deep_product(
    x, weight, out, partial, arrived, rows, columns, depth, share, ROWS: gl.constexpr,
    TILE: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    OVERLAPPED: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One program's share of the steps of ``out = x weight^T``; arguments as of `tile_product`.

    The stages take the weights of ``STAGES - 1`` steps before the wait, and L2 those of AHEAD steps
    more.
    """
    if OVERLAPPED and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    chunks: gl.constexpr = min(STEP // 8, 32)
    spread: gl.constexpr = gl.BlockedLayout([1, 8], [32 // chunks, chunks], [WARPS, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])

    steps = depth // STEP
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, columns // TILE * steps)
    held = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, STEP], shared)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, STEP], shared)

    # Weights are nobody's output: they may be loaded before the kernel before has ended.
    for stage in gl.static_range(STAGES - 1):
        step = gl.minimum(begin + stage, end - 1)
        _copy_weights(held.index(stage), weight, step, steps, depth, TILE, STEP, spread)
    if OVERLAPPED:
        if AHEAD > 0:
            _fetch(weight, begin + STAGES - 1, end, steps, depth, TILE, STEP, AHEAD, line)
        tl.extra.cuda.gdc_wait()
    for stage in gl.static_range(STAGES - 1):
        step = gl.minimum(begin + stage, end - 1)
        _copy_rows(values.index(stage), x, step, steps, rows, depth, ROWS, STEP, spread)
        async_copy.commit_group()

    total = gl.full([TILE, ROWS], 0.0, gl.float32, sums)
    stage = 0
    for step in range(begin, end):
        # One group of copies a step: those of this one are complete if so many are not.
        async_copy.wait_group(STAGES - 2)
        # Afterwards no thread reads the stage of the step before any more, which is filled next.
        barrier()
        fence_async_shared()
        if step + STAGES - 1 < end:
            free = gl.where(stage == 0, STAGES - 1, stage - 1)
            _copy_weights(
                held.index(free), weight, step + STAGES - 1, steps, depth, TILE, STEP, spread
            )
            _copy_rows(
                values.index(free), x, step + STAGES - 1, steps, rows, depth, ROWS, STEP, spread
            )
        async_copy.commit_group()
        total = warpgroup_mma(
            held.index(stage), values.index(stage).permute((1, 0)), total, is_async=False
        )
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        tile = step // steps
        if (step + 1 == end) | (step + 1 == (tile + 1) * steps):
            _finish(
                total, out, partial, arrived, tile, steps, share, rows, columns, ROWS, TILE, sums
            )
            total = gl.full([TILE, ROWS], 0.0, gl.float32, sums)
    async_copy.wait_group(0)

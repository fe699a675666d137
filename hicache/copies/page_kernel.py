"""Copies of many short runs by a kernel: one launch, where a copy engine wants a call a run.

A copy engine is fed about a run a microsecond by the host; a load within a step has thousands, and
the step's own launches wait behind them. A few programs that read pinned memory over the bus fill
it as well, and their table goes to the device in one piece.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_graft.hicache.pages.layout import Addresses, Copies

ALIGNMENT = 16
"""Bytes of a load instruction: addresses and sizes have to be multiples."""

PROGRAMS = 24
"""Enough bytes on their way to fill the bus; the other multiprocessors stay free."""

WORDS = 4096
"""Of 8 bytes, that a program has on their way."""

RangeCopy = Callable[[int, int], None]
"""``(begin, end)``: enqueues these runs of a table on the current stream."""


@triton.jit(do_not_specialize=["total", "begin", "end"])
def _copy_kernel(table, total, begin, end, WORDS: tl.constexpr):
    """``table``: i64 ``[3, total]``: source and target addresses, and sizes in words."""
    for run in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        source = tl.load(table + run).to(tl.pointer_type(tl.int64))
        target = tl.load(table + total + run).to(tl.pointer_type(tl.int64))
        words = tl.multiple_of(tl.load(table + 2 * total + run), 2)
        for first in range(0, words, WORDS):
            at = first + tl.arange(0, WORDS)
            there = at < words
            value = tl.load(tl.multiple_of(source, 16) + at, there, eviction_policy="evict_first")
            tl.store(tl.multiple_of(target, 16) + at, value, there)


def warm_up() -> None:
    """Compile the kernel, which takes longer than a step should."""
    launch(torch.zeros((3, 1), dtype=torch.int64, device="cuda"), 0, 1)


def fits(runs: Copies) -> bool:
    """Whether the kernel can copy them: see :data:`ALIGNMENT`."""
    together = np.bitwise_or.reduce(runs.device | runs.host | runs.sizes) if len(runs) else 0
    return int(together) % ALIGNMENT == 0


def load_runs(runs: Copies) -> RangeCopy:
    """Bring the table of a load, from the host to the device, onto the device.

    Args:
        runs: what to copy; :func:`fits`. Host addresses are pinned ones.

    Returns:
        Enqueues a range of the runs, on the stream that is current now and then.
    """
    rows = np.stack([runs.host, runs.device, runs.sizes // 8])
    table = on_device(rows)
    return lambda begin, end: launch(table, begin, end)


def on_device(rows: Addresses) -> torch.Tensor:
    """A table, behind the current stream's work; the host does not wait."""
    # Pinned, and kept by torch until the stream has read it.
    return torch.from_numpy(rows).pin_memory().to("cuda", non_blocking=True)


def launch(table: torch.Tensor, begin: int, end: int) -> None:
    """Copy the runs ``[begin, end)`` of a table (see the kernel) on the current stream."""
    if begin < end:
        programs = min(PROGRAMS, end - begin)
        _copy_kernel[(programs,)](table, table.shape[1], begin, end, WORDS=WORDS, num_warps=8)

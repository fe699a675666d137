"""A kernel that copies many short runs with one launch. A copy engine needs one call per run, and a
load within a step has thousands of runs, for which the step's own launches would wait. A few
programs of a kernel that read pinned memory fill the bus as well. Their table of runs goes to the
device in one copy."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_graft.hicache.copies.strided import RangeCopy
from vllm_graft.hicache.pages.layout import Addresses, Copies

ALIGNMENT = 16
"""Bytes per load instruction. Addresses and sizes have to be multiples of it."""

PROGRAMS = 24
"""Number of programs. So many keep the bus busy and leave the other multiprocessors free."""

WORDS = 4096
"""Words of 8 bytes that a program copies at a time."""


@triton.jit(do_not_specialize=["total", "begin", "end"])
def _copy_kernel(table, total, begin, end, WORDS: tl.constexpr):
    """Copy the runs ``[begin, end)`` of a table. ``table`` is int64 ``[3, total]``: source
    addresses, target addresses, and sizes in words."""
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
    """Compile the kernel now, because it would delay a step."""
    launch(torch.zeros((3, 1), dtype=torch.int64, device="cuda"), 0, 1)


def fits(runs: Copies) -> bool:
    """Whether the kernel can copy the runs; see :data:`ALIGNMENT`."""
    together = np.bitwise_or.reduce(runs.device | runs.host | runs.sizes) if len(runs) else 0
    return int(together) % ALIGNMENT == 0


def load_runs(runs: Copies) -> RangeCopy:
    """Prepare a load, from pinned host memory, of runs for which :func:`fits` is True. Call the
    result on the stream that is current now, on which the table is copied to the device."""
    table = on_device(np.stack([runs.host, runs.device, runs.sizes // 8]))
    return lambda begin, end: launch(table, begin, end)


def on_device(rows: Addresses) -> torch.Tensor:
    """Copy a table to the device, on the current stream. The host does not wait for it."""
    # Torch keeps the pinned copy until the stream has read it.
    return torch.from_numpy(rows).pin_memory().to("cuda", non_blocking=True)


def launch(table: torch.Tensor, begin: int, end: int) -> None:
    """Launch the kernel for the runs ``[begin, end)`` of ``table`` on the current stream."""
    if begin < end:
        programs = min(PROGRAMS, end - begin)
        _copy_kernel[(programs,)](table, table.shape[1], begin, end, WORDS=WORDS, num_warps=8)

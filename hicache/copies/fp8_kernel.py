"""A kernel that copies between K/V on the device and e4m3 in pinned memory, as ``page_kernel``. It
converts with integers, so that it needs no fp8 hardware and all devices round alike."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_graft.hicache.copies.page_kernel import PROGRAMS, fits, on_device
from vllm_graft.hicache.copies.strided import RangeCopy
from vllm_graft.hicache.messages.operation import Direction
from vllm_graft.hicache.pages.layout import Copies

ELEMENTS = 16384
"""Elements that a program copies at a time."""

STORE_PROGRAMS = 8
"""Number of programs of a store. Nothing waits for stores, and more would slow decoding."""

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _to_e4m3(value):
    """Convert float32 to the bits of e4m3, as uint8."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    kept = tl.minimum(size, 0x43E00000)  # 448
    # Round to three bits of mantissa; a carry goes to the exponent. The biases are 127 and 7.
    normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - 960
    # Below 2 ** -6, e4m3's numbers are 2 ** -9 apart, as float32's are at 2 ** 14. So adding
    # 2 ** 14 rounds to them.
    rounded = kept.to(tl.float32, bitcast=True) + 16384.0
    small = rounded.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(kept < 0x3C800000, small, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _from_e4m3(code):
    """Convert the bits of e4m3 to float32. bfloat16 and float16 also hold all of its numbers."""
    bits = code.to(tl.uint16)
    # Exponent and mantissa are moved to those of a float16. The result is too small by 2 ** 8,
    # because the biases differ by 8, and so are subnormal numbers.
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit(do_not_specialize=["total", "begin", "end"])
def _convert_kernel(
    table, total, begin, end,
    DTYPE: tl.constexpr, STORE: tl.constexpr, ALIGNED: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Convert the runs ``[begin, end)`` of a table. ``table`` is int64 ``[3, total]``: host
    addresses, device addresses, and numbers of elements."""
    for run in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        host = tl.load(table + run).to(tl.pointer_type(tl.uint8))
        device = tl.load(table + total + run).to(tl.pointer_type(DTYPE))
        count = tl.load(table + 2 * total + run)
        if ALIGNED:
            host = tl.multiple_of(host, 16)
            device = tl.multiple_of(device, 16)
            count = tl.multiple_of(count, 16)
        for first in range(0, count, ELEMENTS):
            at = first + tl.arange(0, ELEMENTS)
            there = at < count
            if STORE:
                value = tl.load(device + at, there, eviction_policy="evict_first")
                tl.store(host + at, _to_e4m3(value.to(tl.float32)), there)
            else:
                code = tl.load(host + at, there, eviction_policy="evict_first")
                tl.store(device + at, _from_e4m3(code).to(DTYPE), there)


def warm_up(dtype: torch.dtype) -> None:
    """Compile the kernels now, because it would delay a step."""
    nothing = torch.zeros((3, 1), dtype=torch.int64, device="cuda")
    for direction in Direction:
        for aligned in (True, False):
            launch(nothing, 0, 1, dtype, direction, aligned)


def convert_runs(dtype: torch.dtype, runs: Copies, direction: Direction) -> RangeCopy:
    """Prepare a store or a load of elements of ``dtype``, as ``page_kernel.load_runs`` does. The
    sizes of the runs are bytes on the host, one per element."""
    table = on_device(np.stack([runs.host, runs.device, runs.sizes]))
    aligned = fits(runs)
    return lambda begin, end: launch(table, begin, end, dtype, direction, aligned)


def launch(
    table: torch.Tensor,
    begin: int,
    end: int,
    dtype: torch.dtype,
    direction: Direction,
    aligned: bool,
) -> None:
    """Launch the kernel for the runs ``[begin, end)`` of ``table`` on the current stream.
    ``aligned`` says whether all addresses and numbers of elements are multiples of 16."""
    if begin < end:
        store = direction is Direction.STORE
        programs = STORE_PROGRAMS if store else PROGRAMS
        _convert_kernel[(min(programs, end - begin),)](
            table, table.shape[1], begin, end,
            DTYPE=TYPES[dtype], STORE=store, ALIGNED=aligned, ELEMENTS=ELEMENTS, num_warps=8,
        )  # fmt: skip

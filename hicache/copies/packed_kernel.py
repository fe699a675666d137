"""A kernel that packs K/V on its way to pinned memory, and unpacks it on its way back. The format
is that of ``packed_pages``. A program packs a run tile by tile, and counts the exponents that have
escaped so far: so the list is in order, and equal K/V has equal bytes."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_graft.hicache.copies.fp8_kernel import STORE_PROGRAMS
from vllm_graft.hicache.copies.page_kernel import PROGRAMS, fits, on_device
from vllm_graft.hicache.copies.strided import RangeCopy
from vllm_graft.hicache.messages.operation import Direction
from vllm_graft.hicache.pages.host_form import PACKED
from vllm_graft.hicache.pages.layout import Copies

NUMBERS = 4096
"""Numbers that a program copies at a time."""

LOAD_PROGRAMS = 2 * PROGRAMS
"""Number of programs of a load. They read twice: escaped exponents come after the codes."""


@triton.jit
def _pack(host, device, count, first, taken, NUMBERS: tl.constexpr, UNIT: tl.constexpr):
    """Pack a tile; returns how many exponents have escaped until its end, ``taken`` before it."""
    at = first + tl.arange(0, NUMBERS)
    there = at < count
    bits = tl.load(device + at, there, 0, eviction_policy="evict_first").to(tl.int32) & 0xFFFF
    tl.store(host + at, (((bits >> 8) & 0x80) | (bits & 0x7F)).to(tl.uint8), there)
    exponents = (bits >> 7) & 0xFF
    units = tl.reshape(exponents, [NUMBERS // UNIT, UNIT])
    largest = tl.max(tl.where(units < 255, units, 0), 1)
    distances = tl.reshape(largest[:, None] - units, [NUMBERS]) & 0xFFFF
    low, high = tl.split(tl.reshape(tl.minimum(distances, 15), [NUMBERS // 2, 2]))
    pair = first // 2 + tl.arange(0, NUMBERS // 2)
    tl.store(host + count + pair, (low | (high << 4)).to(tl.uint8), pair < count // 2)
    unit = first // UNIT + tl.arange(0, NUMBERS // UNIT)
    tl.store(host + count // 2 * 3 + unit, largest.to(tl.uint8), unit < count // UNIT)
    escaped = (distances >= 15).to(tl.int32)
    found = tl.sum(escaped)
    if found > 0:
        place = taken + tl.cumsum(escaped) - 1
        listed = (escaped != 0) & (place < count // 32 - 1)
        tl.store(host + count // 64 * 97 + place, exponents.to(tl.uint8), listed)
    return taken + found


@triton.jit
def _unpack(host, device, count, first, taken, NUMBERS: tl.constexpr, UNIT: tl.constexpr):
    """Unpack a tile; see :func:`_pack`."""
    at = first + tl.arange(0, NUMBERS)
    there = at < count
    small = tl.load(host + at, there, 0, eviction_policy="evict_first").to(tl.int32)
    pair = first // 2 + tl.arange(0, NUMBERS // 2)
    pairs = tl.load(host + count + pair, pair < count // 2, 0, eviction_policy="evict_first")
    unit = first // UNIT + tl.arange(0, NUMBERS // UNIT)
    largest = tl.load(host + count // 2 * 3 + unit, unit < count // UNIT, 0).to(tl.int32)
    codes = tl.interleave(pairs & 15, pairs >> 4).to(tl.int32)
    units = tl.reshape(codes, [NUMBERS // UNIT, UNIT])
    exponents = tl.reshape(largest[:, None] - units, [NUMBERS])
    escaped = (codes == 15).to(tl.int32)
    found = tl.sum(escaped)
    if found > 0:
        place = taken + tl.cumsum(escaped) - 1
        listed = (escaped != 0) & (place < count // 32 - 1)
        read = tl.load(host + count // 64 * 97 + place, listed, 0).to(tl.int32)
        exponents = tl.where(escaped != 0, read, exponents)
    bits = ((small & 0x80) << 8) | (exponents << 7) | (small & 0x7F)
    tl.store(device + at, bits.to(tl.int16), there)
    return taken + found


@triton.jit(do_not_specialize=["total", "begin", "end"])
def _packing_kernel(
    table, total, begin, end, STORE: tl.constexpr, ALIGNED: tl.constexpr,
    NUMBERS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Pack or unpack the runs ``[begin, end)`` of a table. ``table`` is int64 ``[3, total]``: host
    addresses, device addresses, and numbers per run."""
    for run in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        host = tl.load(table + run).to(tl.pointer_type(tl.uint8))
        device = tl.load(table + total + run).to(tl.pointer_type(tl.int16))
        count = tl.load(table + 2 * total + run).to(tl.int32)
        if ALIGNED:
            host = tl.multiple_of(host, 16)
            device = tl.multiple_of(device, 16)
            count = tl.multiple_of(count, 1024)
        taken = 0
        for first in range(0, count, NUMBERS):
            if STORE:
                taken = _pack(host, device, count, first, taken, NUMBERS, UNIT)
            else:
                taken = _unpack(host, device, count, first, taken, NUMBERS, UNIT)
        if STORE:
            room = count // 32 - 1
            for first in range(0, room, NUMBERS // 8):
                place = first + tl.arange(0, NUMBERS // 8)
                empty = (place >= taken) & (place < room)
                tl.store(host + count // 64 * 97 + place, tl.zeros_like(place).to(tl.uint8), empty)
            # Without numbers, as in a warm-up, there is no byte of a mark.
            tl.store(host + count // 64 * 99 - 1, (taken > room).to(tl.uint8), count > 0)


def warm_up() -> None:
    """Compile the kernels now, because it would delay a step."""
    nothing = torch.zeros((3, 1), dtype=torch.int64, device="cuda")
    for direction in Direction:
        for aligned in (True, False):
            launch(nothing, 0, 1, direction, aligned)


def convert_runs(runs: Copies, direction: Direction) -> RangeCopy:
    """Prepare a store or a load of bfloat16, as ``page_kernel.load_runs`` does. The sizes of the
    runs are bytes on the host."""
    numbers = runs.sizes // PACKED.unit_bytes * PACKED.unit
    table = on_device(np.stack([runs.host, runs.device, numbers]))
    aligned = fits(runs)
    return lambda begin, end: launch(table, begin, end, direction, aligned)


def launch(table: torch.Tensor, begin: int, end: int, direction: Direction, aligned: bool) -> None:
    """Launch the kernel for the runs ``[begin, end)`` of ``table`` on the current stream.
    ``aligned`` says whether all addresses and bytes on the host are multiples of 16."""
    if begin < end:
        store = direction is Direction.STORE
        programs = STORE_PROGRAMS if store else LOAD_PROGRAMS
        _packing_kernel[(min(programs, end - begin),)](
            table, table.shape[1], begin, end,
            STORE=store, ALIGNED=aligned, NUMBERS=NUMBERS, UNIT=PACKED.unit, num_warps=8,
        )  # fmt: skip

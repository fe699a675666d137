"""Puts the new tokens of the requests into a memory, and into its index."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import next_power_of_2
from vllm_graft.spec_decode.trees.memory_state import (
    LENGTHS,
    LONGEST,
    SAME_PROMPT,
    SEGMENT,
    WAYS,
    MemoryState,
)
from vllm_graft.spec_decode.trees.ngram_state import BORDER

SIZE = tl.constexpr(SEGMENT)
IN_BUCKET = tl.constexpr(WAYS)
INDICES = tl.constexpr(len(LENGTHS))
MOST = tl.constexpr(LONGEST)
OF_PROMPT = tl.constexpr(SAME_PROMPT)
LENGTH_0, LENGTH_1, LENGTH_2, LENGTH_3 = (tl.constexpr(length) for length in LENGTHS)

SCOPE, PROMPT = tl.constexpr(0), tl.constexpr(1)
BEFORE, BEHIND = tl.constexpr(2), tl.constexpr(3)
BEGIN, DONE, LAST, FILL = (tl.constexpr(place) for place in (2, 3, 4, 5))
ROW = tl.constexpr(4)
WRITER = tl.constexpr(6)
NOTHING = tl.constexpr(BORDER)

_FACTOR = tl.constexpr(0x2545F4914F6CDD1D)


@triton.jit
def length_of(index):
    """Tokens that an index looks up."""
    longer = tl.where(index == 0, LENGTH_0, LENGTH_1)
    return tl.where(index < 2, longer, tl.where(index == 2, LENGTH_2, LENGTH_3))


@triton.jit
def seed_of(scope, prompt, index):
    """The hash of no token."""
    return (tl.where(index == OF_PROMPT, prompt, scope) + index) * _FACTOR


@triton.jit
def hashed(seed, token):
    """The hash of one more token."""
    seed = (seed ^ token.to(tl.int64)) * _FACTOR
    return seed ^ ((seed >> 29) & 0x7FFFFFFFF)


@triton.jit
def cell_of(value, way, BUCKETS: tl.constexpr):
    """Where in the cells the hash of some tokens leads."""
    return ((value >> 8) & 0x7FFFFFFFFFFF) % BUCKETS * IN_BUCKET + way


@Kernel
@triton.jit(do_not_specialize=["num_reqs"])
def _turns_kernel(
    total_len,
    idx_mapping,
    writers,
    turns,
    head,
    num_reqs,
    PAD: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Give segments to the requests of a batch, in its order."""
    r = tl.arange(0, PAD)
    slot = tl.load(idx_mapping + r, mask=r < num_reqs, other=-1).to(tl.int64)
    used = slot >= 0
    writer = writers + slot * WRITER
    # Who is nobody's neither reads nor writes.
    used = used & (tl.load(writer + SCOPE, mask=used, other=0) != 0)
    total = tl.load(total_len + slot, mask=used, other=0).to(tl.int64)
    done = tl.load(writer + DONE, mask=used, other=0)
    count = tl.minimum(tl.maximum(total - done, 0), SIZE)
    last = tl.load(writer + LAST, mask=used, other=0)
    fill = tl.load(writer + FILL, mask=used, other=0)
    first = tl.load(head)
    # A request that has waited for long may have lost its segment, or may lose it now.
    is_open = (last > 0) & (last >= first + num_reqs - SEGMENTS)
    last = tl.where(is_open, last, 0)
    fill = tl.where(is_open, fill, SIZE)
    wants = (count > 0) & (fill + count > SIZE)
    wanted = wants.to(tl.int64)
    new = tl.where(wants, first + tl.cumsum(wanted, 0) - 1, 0)
    turn = turns + r * ROW
    inside = r < num_reqs
    tl.store(turn, count, mask=inside)
    tl.store(turn + 1, last, mask=inside)
    tl.store(turn + 2, fill, mask=inside)
    tl.store(turn + 3, new, mask=inside)
    changed = count > 0
    tl.store(writer + BEGIN, done, mask=changed & ~is_open & used)
    tl.store(writer + DONE, done + count, mask=changed)
    tl.store(writer + LAST, tl.where(wants, new, last), mask=changed)
    tl.store(writer + FILL, fill + count - tl.where(wants, SIZE, 0), mask=changed)
    tl.store(head, first + tl.sum(wanted, 0))


@Kernel
@triton.jit
def _write_kernel(
    source, idx_mapping, writers, turns, tokens, segments, cells, source_stride,
    SEGMENTS: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Write what one request adds."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(turns + row * ROW)
    if count > 0:
        slot = tl.load(idx_mapping + row).to(tl.int64)
        last = tl.load(turns + row * ROW + 1)
        fill = tl.load(turns + row * ROW + 2)
        new = tl.load(turns + row * ROW + 3)
        scope = tl.load(writers + slot * WRITER + SCOPE)
        prompt = tl.load(writers + slot * WRITER + PROMPT)
        begin = tl.load(writers + slot * WRITER + BEGIN)
        first = tl.load(writers + slot * WRITER + DONE) - count
        j = tl.arange(0, SIZE)
        if new > 0:
            segment = segments + new % SEGMENTS * ROW
            tl.store(segment + SCOPE, scope)
            tl.store(segment + PROMPT, prompt)
            tl.store(segment + BEFORE, last)
            tl.store(segment + BEHIND, new * 0)
            tl.store(segments + last % SEGMENTS * ROW + BEHIND, new, mask=last > 0)
            behind = tl.full([SIZE], NOTHING, tl.int32)
            tl.store(tokens + new % SEGMENTS * SIZE + j, behind, mask=fill + count <= SIZE + j)
        place = first + j
        added = j < count
        text = source + slot * source_stride
        serial = tl.where(fill + j < SIZE, last, new)
        address = serial * SIZE + (fill + j) % SIZE
        token = tl.load(text + place, mask=added, other=0)
        tl.store(tokens + address % (SEGMENTS * SIZE), token, mask=added)

        index = tl.arange(0, INDICES)[:, None]
        length = length_of(index)
        value = seed_of(scope, prompt, index + address[None, :] * 0)
        for back in tl.static_range(1, MOST + 1):
            known = added & (place - back >= begin)
            before = tl.load(text + place - back, mask=known, other=0)
            value = tl.where(back <= length, hashed(value, before[None, :]), value)
        cell = cell_of(value, (serial % IN_BUCKET)[None, :], BUCKETS)
        whole = added[None, :] & (place[None, :] - length >= begin)
        tl.atomic_max(cells + cell, index * 0 + address[None, :], mask=whole)


def write_memory(
    memory: MemoryState,
    source: torch.Tensor,
    total_len: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_reqs: int,
) -> None:
    """Add the tokens that came to the texts of a batch since they were last in one.

    A request adds at most `SEGMENT` tokens; what is more waits for its next step. No tree yields as
    many, so only the beginning of a long text takes several.

    Args:
        source: i32 ``[max_reqs, width]`` by request-state index, the texts.
        total_len: i32 ``[max_reqs]``, tokens of each text.
        idx_mapping: ``[>= num_reqs]``, request-state index; padding has a negative one.
    """
    if num_reqs == 0:
        return
    _turns_kernel[(1,)](
        total_len, idx_mapping, memory.writers, memory.turns, memory.head, num_reqs,
        PAD=next_power_of_2(len(memory.turns)), SEGMENTS=memory.size,
    )  # fmt: skip
    _write_kernel[(num_reqs,)](
        source, idx_mapping, memory.writers, memory.turns, memory.tokens, memory.segments,
        memory.cells, source.stride(0), SEGMENTS=memory.size, BUCKETS=len(memory.cells),
        num_warps=4,
    )  # fmt: skip

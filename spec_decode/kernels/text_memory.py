"""Keeps texts of requests in a memory, and finds there where the end of another has occurred."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.ngram_match import (
    ALIKE,
    BEHIND,
    END,
    PLACE_BITS,
    ROW,
    SIZE,
    best_key,
    in_order,
    remembered,
)
from vllm_graft.spec_decode.kernels.sizes import next_power_of_2
from vllm_graft.spec_decode.trees.memory_state import (
    LENGTHS,
    LONGEST,
    SAME_PROMPT,
    WAYS,
    MemoryState,
)
from vllm_graft.spec_decode.trees.ngram_state import NgramState

IN_BUCKET = tl.constexpr(WAYS)
INDICES = tl.constexpr(len(LENGTHS))
MOST = tl.constexpr(LONGEST)
OF_PROMPT = tl.constexpr(SAME_PROMPT)
LENGTH_0, LENGTH_1, LENGTH_2, LENGTH_3 = (tl.constexpr(length) for length in LENGTHS)

SCOPE, PROMPT = tl.constexpr(0), tl.constexpr(1)
BEFORE = tl.constexpr(2)
BEGIN, DONE, LAST, FILL = (tl.constexpr(place) for place in (2, 3, 4, 5))
WRITER = tl.constexpr(6)

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
    total_len, idx_mapping, writers, turns, head, num_reqs,
    PAD: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
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
            behind = tl.full([SIZE], END, tl.int32)
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


@Kernel
@triton.jit
def _search_kernel(
    total_len, idx_mapping, history, keys, rates, memory, segments, cells, writers, head,
    history_stride, keys_stride,
    MIN_N: tl.constexpr, MAX_N: tl.constexpr, MAX_N_PAD: tl.constexpr, MATCHES: tl.constexpr,
    REFERENCE: tl.constexpr, LENGTHS: tl.constexpr, SEGMENTS: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Write the keys of the best matches of one request."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping + row)
    used = slot >= 0
    total = tl.load(total_len + slot, mask=used, other=0)
    total = tl.minimum(total, history_stride - REFERENCE)
    text = history + slot * history_stride
    i = tl.arange(0, INDICES * IN_BUCKET)
    index = i // IN_BUCKET
    length = length_of(index)
    scope = tl.load(writers + slot * WRITER + SCOPE, mask=used, other=0)
    prompt = tl.load(writers + slot * WRITER + PROMPT, mask=used, other=0)
    value = seed_of(scope, prompt, index.to(tl.int64))
    for back in tl.static_range(1, MOST + 1):
        last = tl.load(text + total - back, mask=total >= back, other=0)
        value = tl.where(back <= length, hashed(value, last), value)
    known = (length <= total) & (scope != 0)
    address = tl.load(cells + cell_of(value, i % IN_BUCKET, BUCKETS), mask=known, other=0)

    # What the cells say may be long gone, or another's.
    oldest = tl.load(head) - SEGMENTS
    serial = address // SIZE
    known = known & (serial > 0) & (serial >= oldest)
    own = (serial % SEGMENTS).to(tl.int32)
    known = known & (tl.load(segments + own * ROW + SCOPE, mask=known, other=0) == scope)
    theirs = tl.load(segments + own * ROW + PROMPT, mask=known, other=0)
    known = known & ((index != OF_PROMPT) | (theirs == prompt))
    before = tl.load(segments + own * ROW + BEFORE, mask=known, other=0)
    before = tl.where(before >= oldest, before, 0)
    start = own * SIZE + (address % SIZE).to(tl.int32)
    back = tl.arange(0, MAX_N_PAD)[None, :]
    place = (start % SIZE)[:, None] - 1 - back
    there = known[:, None] & (back < MAX_N) & (back < total)
    there = there & ((place >= 0) | (before > 0)[:, None])
    segment = tl.where(place >= 0, own[:, None], (before % SEGMENTS).to(tl.int32)[:, None])
    found = tl.load(memory + segment * SIZE + (place + SIZE) % SIZE, mask=there, other=END)
    mine = tl.load(text + total - 1 - back, mask=(back < MAX_N) & (back < total), other=END)
    n = tl.min(tl.where(there & (found == mine), MAX_N, back), 1)
    known = known & (n >= tl.minimum(length, MAX_N)) & (n >= MIN_N)

    # How many of an index's occurrences go on alike; each occurrence counts once.
    one = known[:, None] & known[None, :]
    token = tl.load(memory + start, mask=known, other=END)
    together = one & (index[:, None] == index[None, :])
    alike = tl.sum((together & (token[:, None] == token[None, :])).to(tl.int32), 1)
    count = tl.sum(together.to(tl.int32), 1)
    share = tl.where(3 * alike >= count, 1, 0) + tl.where(3 * alike >= 2 * count, 1, 0)
    share += tl.where((3 * alike >= 2 * count) & (alike >= 3), 1, 0)
    size = tl.where(n >= 5, 1, 0) + tl.where(n >= 8, 1, 0) + tl.where(n >= 16, 1, 0)
    kind = 1 + share + 4 * size + 16 * (theirs == prompt).to(tl.int32)
    twice = one & (address[:, None] == address[None, :]) & (i[None, :] < i[:, None])
    known = known & (tl.max(twice.to(tl.int32), 1) == 0)
    key = tl.where(known, (kind << PLACE_BITS) | (history_stride + start - 1), 0)
    key = in_order(key, rates, history_stride, REFERENCE, LENGTHS, SEGMENTS)
    later = tl.arange(0, ALIKE)[None, :]
    following = remembered(memory, segments, start[:, None], later, known[:, None], SEGMENTS)
    for m in range(MATCHES):
        best, key = best_key(key, following)
        tl.store(keys + (row + 1) * keys_stride - MATCHES + m, best.to(tl.int32))


def search_memory(
    state: NgramState, total_len: torch.Tensor, idx_mapping: torch.Tensor, num_reqs: int
) -> None:
    """Find the best ``state.matches`` occurrences of the end of each text in the memory.

    Each index looks up so many last tokens; whatever it finds must have the text's scope, and be
    equal in as many tokens at least. The class of a match, from 1 on, is made of what part of what
    an index has found goes on with the same token (under a third, under two thirds, more, more and
    three times), of its length (3, 5, 8 or 16 tokens), and of whether it is an answer to the same
    prompt. Each class has a rate, which is learned. The best rate is first, then the largest class.

    Args:
        state: has a memory, and `match_ngrams` has copied the texts; the last ``state.matches``
            columns of ``keys`` are written: a class, and a place in the memory behind the columns
            of ``history``.
        total_len: i32 ``[max_reqs]``, tokens of each text.
        idx_mapping: i64 ``[num_reqs]``, request-state index; padding has a negative one.
    """
    memory = state.memory
    if num_reqs == 0 or memory is None:
        return
    _search_kernel[(num_reqs,)](
        total_len, idx_mapping, state.history, state.keys, state.rates,
        memory.tokens, memory.segments, memory.cells, memory.writers, memory.head,
        state.history.shape[1], state.keys.shape[1],
        MIN_N=state.min_n, MAX_N=state.max_n, MAX_N_PAD=next_power_of_2(state.max_n),
        MATCHES=state.matches, REFERENCE=state.reference, LENGTHS=state.lengths,
        SEGMENTS=memory.size, BUCKETS=len(memory.cells), num_warps=1,
    )  # fmt: skip

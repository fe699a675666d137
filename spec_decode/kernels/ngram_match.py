"""Finds where the end of a request's text has occurred before; copies the text to the device."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, cdiv
from vllm_graft.spec_decode.trees.text_state import (
    BORDER,
    MAX_PLACE,
    SEGMENT,
    NgramState,
    scan_block,
)

PLACE_BITS = tl.constexpr(MAX_PLACE.bit_length() - 1)
"""Bits of a match's place in its key; the bits above them are its length."""

PLACE_MASK = tl.constexpr(MAX_PLACE - 1)

ALIKE = tl.constexpr(4)
"""Matches count as one if so many tokens that follow them are equal: the best of them is kept."""

MIN_IN_REFERENCE = tl.constexpr(1)
"""Shortest match in a reference, in tokens. What a reference holds is likely to come, and behind a
value that it doesn't know a text meets it again with a single token."""

END = tl.constexpr(BORDER)
"""What ends a piece of a reference."""

SIZE, ROW, BEHIND = tl.constexpr(SEGMENT), tl.constexpr(5), tl.constexpr(3)
"""Tokens of a memory's segment, numbers that are kept of each, and which tells the next one."""


@triton.jit
def is_reference(place, columns, REFERENCE: tl.constexpr):
    """Whether a column of a history of so many columns belongs to the reference."""
    return place >= columns - REFERENCE


@triton.jit
def place_behind(start, d, total, columns, REFERENCE: tl.constexpr):
    """Where the token number `d` from `start` on stands. A match that reaches the end of the text
    goes on with its own beginning. A reference ends, maybe behind the history's last column."""
    period = tl.maximum(total - start, 1)
    return start + tl.where(is_reference(start, columns, REFERENCE), d, d % period)


@triton.jit
def is_remembered(place, columns):
    """Whether a place is one of the memory, whose places are behind the history's."""
    return place >= columns


@triton.jit
def rate_of(n, start, columns, REFERENCE: tl.constexpr, LENGTHS: tl.constexpr):
    """The place of the rate of a match of `n` tokens (a memory's class `n`) before `start`."""
    kind = is_reference(start, columns, REFERENCE).to(tl.int32)
    kind += is_remembered(start, columns).to(tl.int32)
    return n + tl.where(n > 0, kind * LENGTHS, 0)


@triton.jit
def in_order(key, rates, memory, columns, REFERENCE: tl.constexpr, LENGTHS: tl.constexpr):
    """Keys whose order is that of their matches. It is by length, with a memory by what was
    learned, as its classes of matches are no lengths. The key itself is in the lower 32 bits."""
    if memory is not None:
        start = (key & PLACE_MASK) + 1
        place = rate_of(key >> PLACE_BITS, start, columns, REFERENCE, LENGTHS)
        rate = tl.load(rates + place, mask=key > 0, other=0.0).to(tl.int32, bitcast=True)
        # Positive numbers are in the order of their bits.
        key = (rate.to(tl.int64) << 32) | key.to(tl.int64)
    return key


@triton.jit
def remembered(memory, segments, start, d, mask):
    """Tokens of a memory behind `start`, counted from the ring's first; `END` behind the last."""
    place = start % SIZE + d
    own = start // SIZE + d * 0
    behind = tl.load(segments + own * ROW + BEHIND, mask=mask & (place >= SIZE), other=0)
    mask = mask & ((place < SIZE) | (behind > 0))
    segment = tl.where(place < SIZE, own, behind.to(tl.int32) - 1)
    return tl.load(memory + segment * SIZE + place % SIZE, mask=mask, other=END)


@triton.jit
def tokens_behind(text, memory, segments, start, d, total, columns, mask, REFERENCE: tl.constexpr):
    """Tokens of a history that is copied, or of the memory; `END` where there is none."""
    place = place_behind(start, d, total, columns, REFERENCE)
    found = tl.load(text + place, mask=mask & (place < columns), other=END)
    if memory is not None:
        inside = is_remembered(start, columns)
        start = tl.where(inside, start - columns, 0)
        others = remembered(memory, segments, start, d, mask & inside)
        found = tl.where(inside, others, found)
    return found


@triton.jit
def _tokens(source, history, place, copied, columns, mask, REFERENCE: tl.constexpr):
    """Tokens at some places: those of a text from `copied` on are in the engine's memory alone."""
    mask = mask & (place < columns)
    new = (place >= copied) & ~is_reference(place, columns, REFERENCE)
    fresh = tl.load(source + place, mask=mask & new, other=-1)
    known = tl.load(history + place, mask=mask & ~new, other=-1)
    return tl.where(new, fresh, known)


@triton.jit
def best_key(key, following):
    """The largest key, and the keys without those of all matches that are like it. `key` is i32
    ``[K]``, all different, 0 for none; `following` is i32 ``[K, ALIKE]``, the tokens that follow
    each match."""
    best = tl.max(key, 0)
    wanted = tl.sum(tl.where((key == best)[:, None], following, 0), 0)
    same = tl.min((following == wanted[None, :]).to(tl.int32), 1)
    return best, tl.where(same > 0, 0, key)


@triton.jit
def _clear(keys, MATCHES: tl.constexpr):
    for i in range(MATCHES):
        tl.store(keys + i, 0)


@Kernel
@triton.jit
def _match_kernel(
    source, total_len, idx_mapping, history, notes, keys,
    source_stride, history_stride, keys_stride,
    MIN_N: tl.constexpr, MAX_N: tl.constexpr, BLOCK: tl.constexpr, MATCHES: tl.constexpr,
    REFERENCE: tl.constexpr,
):  # fmt: skip
    """Write the keys of the best matches that end in one block of one request's history."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(idx_mapping + row)
    used = slot >= 0
    total = tl.load(total_len + slot, mask=used, other=0)
    width = history_stride - REFERENCE
    total = tl.minimum(total, width)
    keys += row * keys_stride + block * MATCHES
    searched = block * BLOCK < total
    if REFERENCE > 0:
        searched = searched | (used & (block * BLOCK + BLOCK > width))
    if searched:
        source += slot * source_stride
        history += slot * history_stride
        copied = tl.load(notes + 4 * slot)
        end = block * BLOCK + tl.arange(0, BLOCK)
        new = (end >= copied) & (end < total)
        tl.store(history + end, tl.load(source + end, mask=new, other=0), mask=new)
        # An earlier occurrence ends before the text does, so that a token follows it.
        alive = end < total - 1
        first = tl.zeros([BLOCK], tl.int32)
        shortest = first + MIN_N
        if REFERENCE > 0:
            inside = is_reference(end, history_stride, REFERENCE)
            has_next = inside & (end + 1 < history_stride)
            alive = alive | (tl.load(history + end + 1, mask=has_next, other=END) != END)
            # The text ends where the reference begins.
            first = tl.where(inside, width, 0)
            shortest = tl.where(inside, MIN_IN_REFERENCE, MIN_N)
        length = tl.zeros([BLOCK], tl.int32)
        n = 0
        # Most blocks hold the last token nowhere, or not with the one before it.
        while n < MAX_N:
            back = total - 1 - n
            last = _tokens(source, history, back, copied, history_stride, back >= 0, REFERENCE)
            alive = alive & (end - n >= first)
            here = _tokens(source, history, end - n, copied, history_stride, alive, REFERENCE)
            alive = alive & (here == last)
            length += alive.to(tl.int32)
            n = tl.where(tl.max(alive.to(tl.int32), 0) > 0, n + 1, MAX_N)
        key = tl.where(length >= shortest, (length << PLACE_BITS) | end, 0)
        if tl.max(key, 0) > 0:
            if MATCHES == 1:
                tl.store(keys, tl.max(key, 0))
            else:
                later = tl.arange(0, ALIKE)[None, :]
                place = place_behind(end[:, None] + 1, later, total, history_stride, REFERENCE)
                found = (key > 0)[:, None]
                following = _tokens(
                    source, history, place, copied, history_stride, found, REFERENCE
                )
                for i in range(MATCHES):
                    best, key = best_key(key, following)
                    tl.store(keys + i, best)
        else:
            _clear(keys, MATCHES)
    else:
        _clear(keys, MATCHES)


def match_ngrams(
    state: NgramState,
    source: torch.Tensor,
    total_len: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_reqs: int,
) -> None:
    """Find the longest suffix of each text that has occurred before; of equals, the last one.

    The idea is prompt lookup decoding (Saxena 2023; vLLM's ``ngram`` method). A suffix that the
    request's reference has counts as well, from `MIN_IN_REFERENCE` tokens on, and before an
    occurrence in the text that is as long. With ``state.matches`` more than one, the best matches
    of each block are found whose next `ALIKE` tokens differ. The text is scanned in blocks, one
    program each; new tokens of `source`, vLLM's host memory, are copied to the device in passing.

    Args:
        state: ``keys`` and the texts in ``history`` are written.
        source: i32 ``[max_reqs, >= width]`` by request-state index, the texts.
        total_len: i32 ``[max_reqs]``, tokens of each text.
        idx_mapping: i64 ``[num_reqs]``, request-state index; padding has a negative one.
    """
    if num_reqs == 0:
        return
    columns = state.history.shape[1]
    block = scan_block(columns)
    _match_kernel[(num_reqs, cdiv(columns, block))](
        source, total_len, idx_mapping, state.history, state.notes, state.keys, source.stride(0),
        columns, state.keys.shape[1],
        MIN_N=state.min_n, MAX_N=state.max_n, BLOCK=block, MATCHES=state.matches,
        REFERENCE=state.reference, num_warps=4 if block > 512 else 1,
    )  # fmt: skip

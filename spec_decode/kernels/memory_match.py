"""Finds in a memory of texts where the end of a request's text has occurred before."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.memory_write import (
    BEFORE,
    IN_BUCKET,
    INDICES,
    MOST,
    OF_PROMPT,
    PROMPT,
    ROW,
    SCOPE,
    SIZE,
    WRITER,
    cell_of,
    hashed,
    length_of,
    seed_of,
)
from vllm_graft.spec_decode.kernels.ngram_match import (
    ALIKE,
    END,
    PLACE_BITS,
    best_key,
    in_order,
    remembered,
)
from vllm_graft.spec_decode.kernels.sizes import next_power_of_2
from vllm_graft.spec_decode.trees.ngram_state import NgramState


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

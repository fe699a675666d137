"""Keeps texts of requests in a memory, and finds there where the end of another has occurred."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, next_power_of_2
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
from vllm_graft.spec_decode.trees.text_state import (
    BORDER,
    LENGTHS,
    LONGEST,
    SAME_PROMPT,
    SEGMENT,
    WAYS,
    MemoryState,
    NgramState,
)

IN_BUCKET = tl.constexpr(WAYS)
INDICES = tl.constexpr(len(LENGTHS))
MOST = tl.constexpr(LONGEST)
OF_PROMPT = tl.constexpr(SAME_PROMPT)
LENGTH_0, LENGTH_1, LENGTH_2, LENGTH_3 = (tl.constexpr(length) for length in LENGTHS)

SCOPE, PROMPT, BEFORE = (tl.constexpr(place) for place in range(3))
FIRST, REQUEST = tl.constexpr(2), tl.constexpr(3)
BEGIN, DONE, LAST, FILL, OF = (tl.constexpr(place) for place in range(5))
OWNER, WRITER = tl.constexpr(4), tl.constexpr(5)

BUCKETS = tl.constexpr(SEGMENT * len(LENGTHS) // WAYS)
"""Buckets of the index for each segment."""

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
def cell_of(value, way, SEGMENTS: tl.constexpr):
    """Where in the cells of so many segments the hash of some tokens leads."""
    return ((value >> 8) & 0x7FFFFFFFFFFF) % (SEGMENTS * BUCKETS) * IN_BUCKET + way


@triton.jit
def put(text, place, begin, address, added, scope, prompt, cells, SEGMENTS: tl.constexpr):
    """Put the addresses of some tokens to where the hashes of those before them lead."""
    index = tl.arange(0, INDICES)[:, None]
    length = length_of(index)
    value = seed_of(scope, prompt, index + address[None, :] * 0)
    for back in tl.static_range(1, MOST + 1):
        known = added & (place - back >= begin)
        before = tl.load(text + place - back, mask=known, other=0)
        value = tl.where(back <= length, hashed(value, before[None, :]), value)
    cell = cell_of(value, (address // SIZE % IN_BUCKET)[None, :], SEGMENTS)
    whole = added[None, :] & (place[None, :] - length >= begin)
    # Nobody asks a corpus, which is of no prompt, for answers to one.
    whole = whole & ((index != OF_PROMPT) | (prompt != 0))
    tl.atomic_max(cells + cell, index * 0 + address[None, :], mask=whole)


@triton.jit
def mine(values, r, row):
    """The number of this program's row."""
    return tl.sum(tl.where(r == row, values, 0), 0)


@Kernel
@triton.jit
def _write_kernel(
    source, total_len, idx_mapping, owners, writers, head, tokens, segments, cells, source_stride,
    REQUESTS: tl.constexpr, PAD: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Write what one request adds. Each program counts what all of the batch add, in its order."""
    row, programs = tl.program_id(0), tl.num_programs(0)
    r = tl.arange(0, PAD)
    slot = tl.load(idx_mapping + r, mask=r < programs, other=-1).to(tl.int64)
    used = slot >= 0
    owner = owners + slot * OWNER
    scope = tl.load(owner + SCOPE, mask=used, other=0)
    # Who is nobody's neither reads nor writes.
    used = used & (scope != 0)
    request = tl.load(owner + REQUEST, mask=used, other=0)
    writer = writers + slot * WRITER
    known = used & (tl.load(writer + OF, mask=used, other=0) == request)
    total = tl.load(total_len + slot, mask=used, other=0).to(tl.int64)
    start = tl.load(owner + FIRST, mask=used, other=0)
    done = tl.where(known, tl.load(writer + DONE, mask=known, other=0), start)
    count = tl.minimum(tl.maximum(total - done, 0), SIZE)
    last = tl.load(writer + LAST, mask=known, other=0)
    first = tl.load(head)
    # A request that has waited for long may have lost its segment, or may lose it now.
    is_open = (last > 0) & (last >= first + REQUESTS - SEGMENTS)
    begin = tl.where(is_open, tl.load(writer + BEGIN, mask=known, other=0), done)
    last = tl.where(is_open, last, 0)
    fill = tl.where(is_open, tl.load(writer + FILL, mask=known, other=0), SIZE)
    wants = (count > 0) & (fill + count > SIZE)
    wanted = wants.to(tl.int64)
    new = tl.where(wants, first + tl.cumsum(wanted, 0) - 1, 0)

    added = mine(count, r, row)
    if added > 0:
        _write_row(
            source + mine(slot, r, row) * source_stride, mine(scope, r, row),
            tl.load(owners + mine(slot, r, row) * OWNER + PROMPT), mine(request, r, row),
            mine(begin, r, row), mine(done, r, row), added, mine(last, r, row), mine(fill, r, row),
            mine(new, r, row), tokens, segments, cells, SEGMENTS,
        )  # fmt: skip
    # The last program notes what all have written: none reads the notes of before any more.
    tl.debug_barrier()
    is_last = tl.atomic_add(head + 1, 1) == programs - 1
    changed = used & (count > 0) & is_last
    tl.store(writer + BEGIN, begin, mask=changed)
    tl.store(writer + DONE, done + count, mask=changed)
    tl.store(writer + LAST, tl.where(wants, new, last), mask=changed)
    tl.store(writer + FILL, fill + count - tl.where(wants, SIZE, 0), mask=changed)
    tl.store(writer + OF, request, mask=changed)
    tl.store(head, first + tl.sum(wanted, 0), mask=is_last)
    tl.store(head + 1, first * 0, mask=is_last)


@triton.jit
def _write_row(
    text, scope, prompt, request, begin, done, count, last, fill, new, tokens, segments, cells,
    SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Write tokens of a text to its last segment and to a new one."""
    j = tl.arange(0, SIZE)
    if new > 0:
        segment = segments + new % SEGMENTS * ROW
        tl.store(segment + SCOPE, scope)
        tl.store(segment + PROMPT, prompt)
        tl.store(segment + BEFORE, last)
        tl.store(segment + BEHIND, new * 0)
        tl.store(segment + OF, request)
        tl.store(segments + last % SEGMENTS * ROW + BEHIND, new % SEGMENTS + 1, mask=last > 0)
        behind = tl.full([SIZE], END, tl.int32)
        tl.store(tokens + new % SEGMENTS * SIZE + j, behind, mask=fill + count <= SIZE + j)
    place = done + j
    added = j < count
    address = tl.where(fill + j < SIZE, last, new) * SIZE + (fill + j) % SIZE
    token = tl.load(text + place, mask=added, other=0)
    tl.store(tokens + address % (SEGMENTS * SIZE), token, mask=added)
    put(text, place, begin, address, added, scope, prompt, cells, SEGMENTS)


def write_memory(
    memory: MemoryState,
    source: torch.Tensor,
    total_len: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_reqs: int,
) -> None:
    """Add the tokens that came to the texts of a batch since they were last in one. Capturable.

    A request adds at most `SEGMENT` tokens; what is more waits for its next step. No tree yields as
    many, so only the beginning of a long text takes several. If it is done twice in a step, nothing
    is added the second time. `source`: i32 ``[max_reqs, width]`` by request-state index, the texts.
    `total_len`: i32 ``[max_reqs]``, tokens of each text. `idx_mapping`: ``[>= num_reqs]``,
    request-state index; padding has a negative one."""
    if num_reqs == 0:
        return
    requests = len(memory.writers)
    _write_kernel[(num_reqs,)](
        source, total_len, idx_mapping, memory.owners, memory.writers, memory.head, memory.tokens,
        memory.segments, memory.cells, source.stride(0),
        REQUESTS=requests, PAD=next_power_of_2(requests), SEGMENTS=memory.size, num_warps=4,
    )  # fmt: skip


@Kernel
@triton.jit
def _corpus_kernel(
    text, places, segments, cells, serial, BEFORE_IT: tl.constexpr, CORPORA: tl.constexpr
):
    """Put the addresses of one segment of a corpus to the index."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    segment = segments + (BEFORE_IT + place) * ROW
    j = tl.arange(0, SIZE)
    begin = tl.where(tl.load(segment + BEFORE) > 0, -SIZE, 0)
    text += row * SIZE
    added = tl.load(text + j) != END
    cells += BEFORE_IT * BUCKETS * IN_BUCKET
    address = (serial + place) * SIZE + j
    scope, prompt = tl.load(segment + SCOPE), tl.load(segment + PROMPT)
    put(text, j, begin, address, added, scope, prompt, cells, CORPORA)


def write_corpus(
    memory: MemoryState, scope: int, places: Sequence[int], texts: Sequence[int], first: int
) -> None:
    """Add a corpus of a scope to the memory.

    Args:
        scope: requests of this one find it.
        places: segments of corpora that are free, from 0 on, enough for all tokens.
        texts: the tokens of its texts, a `BORDER` behind each.
        first: serial of the segment at place 0: a multiple of ``memory.corpora``, larger than that
            of all corpora before it.
    """
    if not places:
        return
    text = torch.full((len(places), SEGMENT), BORDER, dtype=torch.int32)
    text.view(-1)[: len(texts)] = torch.tensor(texts, dtype=torch.int32)
    place = torch.tensor(places)
    rows = torch.zeros(len(places), 5, dtype=torch.int64)
    rows[:, 0] = scope
    rows[1:, 2] = first + place[:-1]
    rows[:-1, 3] = memory.size + place[1:] + 1
    device = memory.tokens.device
    text, place, rows = (each.to(device) for each in (text, place, rows))
    memory.tokens[memory.size + place] = text
    memory.segments[memory.size + place] = rows
    _corpus_kernel[(len(places),)](
        text, place, memory.segments, memory.cells, first,
        BEFORE_IT=memory.size, CORPORA=memory.corpora,
    )  # fmt: skip


def drop_corpus(memory: MemoryState, places: Sequence[int]) -> None:
    """Let nobody find what is in some segments of corpora."""
    rows = memory.size + torch.tensor(places, device=memory.segments.device)
    memory.segments[rows, 0] = 0


@Kernel
@triton.jit
def _search_kernel(
    total_len, idx_mapping, history, keys, rates, memory, segments, cells, owners, head,
    history_stride, keys_stride,
    MIN_N: tl.constexpr, MAX_N: tl.constexpr, MAX_N_PAD: tl.constexpr, MATCHES: tl.constexpr,
    REFERENCE: tl.constexpr, LENGTHS: tl.constexpr, SEGMENTS: tl.constexpr, BEFORE_IT: tl.constexpr,
    COLUMN: tl.constexpr,
):  # fmt: skip
    """Write the keys of the best matches of one request, among some segments behind others."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping + row)
    used = slot >= 0
    total = tl.load(total_len + slot, mask=used, other=0)
    total = tl.minimum(total, history_stride - REFERENCE)
    text = history + slot * history_stride
    i = tl.arange(0, INDICES * IN_BUCKET)
    index = i // IN_BUCKET
    length = length_of(index)
    owner = owners + slot * OWNER
    scope = tl.load(owner + SCOPE, mask=used, other=0)
    prompt = tl.load(owner + PROMPT, mask=used, other=0)
    request = tl.load(owner + REQUEST, mask=used, other=0)
    value = seed_of(scope, prompt, index.to(tl.int64))
    for back in tl.static_range(1, MOST + 1):
        last = tl.load(text + total - back, mask=total >= back, other=0)
        value = tl.where(back <= length, hashed(value, last), value)
    known = (length <= total) & (scope != 0)
    cells += BEFORE_IT * BUCKETS * IN_BUCKET
    address = tl.load(cells + cell_of(value, i % IN_BUCKET, SEGMENTS), mask=known, other=0)

    # What the cells say may be long gone, another's, or this very text, in which n-grams are
    # looked for besides. In corpora nothing grows old.
    oldest = tl.where(BEFORE_IT > 0, 1, tl.load(head) - SEGMENTS)
    serial = address // SIZE
    known = known & (serial > 0) & (serial >= oldest)
    own = BEFORE_IT + (serial % SEGMENTS).to(tl.int32)
    known = known & (tl.load(segments + own * ROW + SCOPE, mask=known, other=0) == scope)
    known = known & (tl.load(segments + own * ROW + OF, mask=known, other=0) != request)
    theirs = tl.load(segments + own * ROW + PROMPT, mask=known, other=0)
    known = known & ((index != OF_PROMPT) | (theirs == prompt))
    before = tl.load(segments + own * ROW + BEFORE, mask=known, other=0)
    before = tl.where(before >= oldest, before, 0)
    start = own * SIZE + (address % SIZE).to(tl.int32)
    back = tl.arange(0, MAX_N_PAD)[None, :]
    place = (start % SIZE)[:, None] - 1 - back
    there = known[:, None] & (back < MAX_N) & (back < total)
    there = there & ((place >= 0) | (before > 0)[:, None])
    segment = tl.where(
        place >= 0, own[:, None], BEFORE_IT + (before % SEGMENTS).to(tl.int32)[:, None]
    )
    found = tl.load(memory + segment * SIZE + (place + SIZE) % SIZE, mask=there, other=END)
    mine = tl.load(text + total - 1 - back, mask=(back < MAX_N) & (back < total), other=END)
    n = tl.min(tl.where(there & (found == mine), MAX_N, back), 1)
    least = tl.where(index == OF_PROMPT, 1, tl.maximum(MIN_N, tl.minimum(length, MAX_N)))
    known = known & (n >= least)

    # How many of an index's occurrences go on alike; each occurrence counts once.
    one = known[:, None] & known[None, :]
    token = tl.load(memory + start, mask=known, other=END)
    together = one & (index[:, None] == index[None, :])
    alike = tl.sum((together & (token[:, None] == token[None, :])).to(tl.int32), 1)
    count = tl.sum(together.to(tl.int32), 1)
    share = tl.where(3 * alike >= count, 1, 0) + tl.where(3 * alike >= 2 * count, 1, 0)
    share += tl.where((3 * alike >= 2 * count) & (alike >= 3), 1, 0)
    size = tl.where(n >= 3, 1, 0) + tl.where(n >= 5, 1, 0) + tl.where(n >= 8, 1, 0)
    kind = 1 + share + 4 * size + 16 * (theirs == prompt).to(tl.int32)
    kind += 32 if BEFORE_IT > 0 else 0
    twice = one & (address[:, None] == address[None, :]) & (i[None, :] < i[:, None])
    known = known & (tl.max(twice.to(tl.int32), 1) == 0)
    key = tl.where(known, (kind << PLACE_BITS) | (history_stride + start - 1), 0)
    key = in_order(key, rates, memory, history_stride, REFERENCE, LENGTHS)
    later = tl.arange(0, ALIKE)[None, :]
    following = remembered(memory, segments, start[:, None], later, known[:, None])
    for m in range(MATCHES):
        best, key = best_key(key, following)
        tl.store(keys + row * keys_stride + COLUMN + m, best.to(tl.int32))


def search_memory(
    state: NgramState, total_len: torch.Tensor, idx_mapping: torch.Tensor, num_reqs: int
) -> None:
    """Find the best ``state.matches`` occurrences of the end of each text in others of the memory.

    Each index looks up so many last tokens; whatever it finds must have the text's scope, and be
    equal in as many tokens at least. The class of a match, from 1 on, is made of what part of what
    an index has found goes on with the same token (under a third, under two thirds, more, more and
    three times), of its length (1, 3, 5 or 8 tokens), and of whether it is an answer to the same
    prompt, or in a corpus. Each class has a rate, which is learned. The best rate is first, then
    the largest class.

    Args:
        state: has a memory, and `match_ngrams` has copied the texts; the last ``state.matches``
            columns of ``keys`` are written, and as many before them for corpora: a class, and a
            place in the memory behind the columns of ``history``.
        total_len: i32 ``[max_reqs]``, tokens of each text.
        idx_mapping: i64 ``[num_reqs]``, request-state index; padding has a negative one.
    """
    memory = state.memory
    if num_reqs == 0 or memory is None:
        return
    column = state.keys.shape[1]
    for before, segments in ((0, memory.size), (memory.size, memory.corpora)):
        if segments:
            column -= state.matches
            _search_kernel[(num_reqs,)](
                total_len, idx_mapping, state.history, state.keys, state.rates,
                memory.tokens, memory.segments, memory.cells, memory.owners, memory.head,
                state.history.shape[1], state.keys.shape[1],
                MIN_N=state.min_n, MAX_N=state.max_n, MAX_N_PAD=next_power_of_2(state.max_n),
                MATCHES=state.matches, REFERENCE=state.reference, LENGTHS=state.lengths,
                SEGMENTS=segments, BEFORE_IT=before, COLUMN=column, num_warps=1,
            )  # fmt: skip

"""Puts the continuations of matches among a request's candidates, and learns how matches do."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, next_power_of_2
from vllm_graft.spec_decode.kernels.ngram_match import (
    ALIKE,
    END,
    PLACE_BITS,
    PLACE_MASK,
    best_key,
    in_order,
    is_remembered,
    rate_of,
    tokens_behind,
)
from vllm_graft.spec_decode.trees.text_state import NgramState
from vllm_graft.spec_decode.trees.tree import CandidateTable


@triton.jit
def observe(
    text, memory, segments, pending, note, used, total, d, columns,
    DEPTH: tl.constexpr, REFERENCE: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """Compare what the noted match predicted with the tokens that have come since."""
    start = tl.load(note + 1, mask=used, other=0)
    n = tl.load(note + 2, mask=used, other=0)
    before = tl.load(note + 3, mask=used, other=0)
    told = (n > 0) & (d < total - before) & (d < DEPTH)
    predicted = tokens_behind(text, memory, segments, start, d, before, columns, told, REFERENCE)
    # Behind the end of its piece a reference has predicted nothing, nor a memory behind its text's.
    told = told & (d < tl.min(tl.where(predicted == END, d, DEPTH), 0))
    actual = tl.load(text + before + d, mask=told, other=0)
    count = tl.sum(told.to(tl.int32), 0)
    hits = tl.min(tl.where(told & (predicted != actual), d, count), 0)
    # The first token that was wrong ends the comparison: those after it follow another text.
    trials = hits + (hits < count).to(tl.int32)
    counted = pending + 2 * rate_of(n, start, columns, REFERENCE, LENGTHS)
    tl.atomic_add(counted, trials, mask=trials > 0)
    tl.atomic_add(counted + 1, hits, mask=hits > 0)


@triton.jit
def keep_note(note, used, start, n, total):
    """Note the match of `n` tokens after which `start` comes, in a text of `total` tokens."""
    # Every thread must have read the old note.
    tl.debug_barrier()
    tl.store(note, total, mask=used)
    tl.store(note + 1, start, mask=used)
    tl.store(note + 2, n, mask=used)
    tl.store(note + 3, total, mask=used)


@Kernel
@triton.jit
def _insert_kernel(
    total_len, idx_mapping, history, notes, pending, rates, keys, memory, segments, sources, scores,
    tokens, parents, history_stride, vocab_size,
    WIDTH: tl.constexpr, TOPK: tl.constexpr, LEVELS: tl.constexpr, FIRST: tl.constexpr,
    DEPTH: tl.constexpr, DEPTH_PAD: tl.constexpr, CHILDREN_PAD: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCKS_PAD: tl.constexpr, REFERENCE: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * WIDTH
    tokens += row * WIDTH
    parents += row * WIDTH
    slot = tl.load(idx_mapping + row)
    used = slot >= 0
    total = tl.load(total_len + slot, mask=used, other=0)
    total = tl.minimum(total, history_stride - REFERENCE)
    text = history + slot * history_stride
    note = notes + slot * 4
    d = tl.arange(0, DEPTH_PAD)
    observe(
        text, memory, segments, pending, note, used, total, d, history_stride,
        DEPTH, REFERENCE, LENGTHS,
    )  # fmt: skip

    b = tl.arange(0, BLOCKS_PAD)
    found = tl.load(keys + row * BLOCKS + b, mask=(b < BLOCKS) & used, other=0)
    found = in_order(found, rates, memory, history_stride, REFERENCE, LENGTHS)
    key = tl.max(found, 0).to(tl.int32)
    n = key >> PLACE_BITS
    start = (key & PLACE_MASK) + 1
    keep_note(note, used, start, n, total)
    if memory is not None:
        tl.store(sources + row, is_remembered(start, history_stride).to(tl.int32))

    copied = (n > 0) & (d < DEPTH)
    token = tokens_behind(
        text, memory, segments, start, d, total, history_stride, copied, REFERENCE
    )
    # Places of a prompt's embeddings may hold what is no token, as the end of a piece does.
    length = tl.min(tl.where((token >= 0) & (token < vocab_size), DEPTH_PAD, d), 0)
    log_rate = tl.log(tl.load(rates + rate_of(n, start, history_stride, REFERENCE, LENGTHS)))

    # Follow the candidates that the draft has found, too.
    child = tl.arange(0, CHILDREN_PAD)
    depth = key * 0
    current = depth - 1
    going = length > 0
    while going:
        first = tl.maximum(TOPK + (depth - 1) * TOPK * TOPK, 0)
        inside = child < tl.where(depth == 0, TOPK, TOPK * TOPK)
        wanted = tl.sum(tl.where(d == depth, token, 0), 0)
        theirs = tl.load(tokens + first + child, mask=inside, other=-1)
        same = inside & (theirs == wanted)
        same = same & (tl.load(parents + first + child, mask=inside, other=-2) == current)
        place = tl.min(tl.where(same, child, CHILDREN_PAD), 0)
        going = place < CHILDREN_PAD
        if going:
            current = first + place
            depth += 1
            # Its ancestors have at least this score: each of them is on the match's path.
            score = tl.maximum(tl.load(scores + current), depth * log_rate)
            tl.debug_barrier()
            tl.store(scores + current, score)
            going = (depth < LEVELS) & (depth < length)

    # What the draft has not found comes behind its candidates.
    place = d - depth
    added = (place >= 0) & (d < length)
    score = tl.where(added, (d + 1) * log_rate, float("-inf"))
    parent = tl.where(place == 0, current, FIRST + place - 1)
    # Columns that are not used rank behind all others.
    column = tl.where(place >= 0, place, DEPTH + place)
    inside = d < DEPTH
    tl.store(scores + FIRST + column, score, mask=inside)
    tl.store(tokens + FIRST + column, tl.where(added, token, 0).to(tl.int64), mask=inside)
    tl.store(parents + FIRST + column, tl.where(added, parent, -1), mask=inside)


def insert_ngrams(
    table: CandidateTable, state: NgramState, total_len: torch.Tensor, idx_mapping: torch.Tensor,
    num_reqs: int, *, levels: int, first: int, depth: int, vocab_size: int,
) -> None:  # fmt: skip
    """Add each match's continuation to the candidates: one path down from the root.

    A match of n tokens predicts ``depth`` tokens, or fewer if the vocabulary or the end of a
    reference's piece ends it: the token of depth ``d`` has the score ``d * log(rates[n])``. A
    candidate that the draft has found as well gets at least this score; the rest of the path is
    appended. So no two siblings have the same token, and no score exceeds its parent's.

    Args:
        table: has ``levels`` levels; ``depth`` columns from ``first`` on, which lies behind them,
            are written, those without a candidate with a score of -inf.
        state: ``keys`` as `match_ngrams` has left them; ``notes`` and ``pending`` are written.
        total_len: i32 ``[max_reqs]`` by request-state index, tokens of each text.
        idx_mapping: i64 ``[num_reqs]``, request-state index; padding has a negative one.
    """
    topk, width = table.topk, table.scores.shape[1]
    if num_reqs == 0:
        return
    blocks = state.keys.shape[1]
    _insert_kernel[(num_reqs,)](
        *read_and_written(table, state, total_len, idx_mapping), vocab_size,
        WIDTH=width, TOPK=topk, LEVELS=levels, FIRST=first, DEPTH=depth,
        DEPTH_PAD=next_power_of_2(depth),
        CHILDREN_PAD=next_power_of_2(topk if levels == 1 else topk**2), BLOCKS=blocks,
        BLOCKS_PAD=next_power_of_2(blocks), REFERENCE=state.reference, LENGTHS=state.lengths,
        num_warps=1 if topk <= 8 else 4,
    )  # fmt: skip


def read_and_written(
    table: CandidateTable, state: NgramState, total_len: torch.Tensor, idx_mapping: torch.Tensor
) -> tuple[torch.Tensor | int | None, ...]:
    """The first arguments of a kernel that inserts matches."""
    return (
        total_len, idx_mapping,
        state.history, state.notes, state.pending, state.rates, state.keys, *state.remembered,
        state.sources, table.scores, table.tokens, table.parents, state.history.shape[1],
    )  # fmt: skip


MEMORY = 256.0
"""Predicted tokens after which what was seen of a match length counts for 1/e."""

LOWEST, HIGHEST = 0.01, 0.99
"""Bounds of a learned rate: its logarithm has to be negative and finite."""


@triton.jit
def learn(
    pending, rates, counts, published,
    PAD: tl.constexpr, COUNTS: tl.constexpr,
    MEMORY: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Move each rate towards what was seen, and copy the counts to the host."""
    n = tl.arange(0, PAD)
    trials = tl.load(pending + 2 * n).to(tl.float32)
    hits = tl.load(pending + 2 * n + 1).to(tl.float32)
    rate = tl.load(rates + n)
    rate += (hits / tl.maximum(trials, 1.0) - rate) * (1.0 - tl.exp(-trials / MEMORY))
    tl.store(rates + n, tl.minimum(tl.maximum(rate, LOW), HIGH), mask=trials > 0)
    tl.store(pending + 2 * n, tl.zeros([PAD], tl.int32))
    tl.store(pending + 2 * n + 1, tl.zeros([PAD], tl.int32))
    count = tl.arange(0, COUNTS)
    tl.store(published + count, tl.load(counts + count))


@Kernel
@triton.jit
def _learn_kernel(
    pending, rates, counts, published,
    PAD: tl.constexpr, COUNTS: tl.constexpr,
    MEMORY: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    learn(pending, rates, counts, published, PAD, COUNTS, MEMORY, LOW, HIGH)


class Learned(NamedTuple):
    """What is learned from a step, by `learn_rates` or in another launch of it. `pending`:
    `NgramState.pending`; `rates` likewise. `counts`: int64, a power of two of them. `published`: as
    long, in pinned memory of the host, which a kernel writes as its own."""

    pending: torch.Tensor
    rates: torch.Tensor
    counts: torch.Tensor
    published: torch.Tensor

    @property
    def constants(self) -> dict[str, Any]:
        """The constants of `learn`."""
        sizes = {"PAD": len(self.rates), "COUNTS": len(self.counts)}
        return {**sizes, "MEMORY": MEMORY, "LOW": LOWEST, "HIGH": HIGHEST}


def learn_rates(learned: Learned) -> None:
    """Move each rate towards what was seen since the last call: an exponential average; and copy
    the counts to the host, which does not wait for them.

    It is no part of a growth. So a growth that runs again in the same step, as when a graph is
    compared with launches, finds the same rates and chooses the same tree."""
    _learn_kernel[(1,)](*learned, **learned.constants, num_warps=1)


UNLIKELY = tl.constexpr(-1e20)
"""Log-probability of a token in the place of what is no token, such as a prompt's embedding."""


@Kernel
@triton.jit
def _paths_kernel(
    total_len, idx_mapping, history, notes, pending, rates, keys, memory, segments, sources, scores,
    tokens, parents, history_stride, vocab_size,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, PATHS: tl.constexpr, PATHS_PAD: tl.constexpr,
    DEPTH: tl.constexpr, DEPTH_PAD: tl.constexpr, KEYS: tl.constexpr, KEYS_PAD: tl.constexpr,
    REFERENCE: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * WIDTH + FIRST
    tokens += row * WIDTH + FIRST
    parents += row * WIDTH + FIRST
    slot = tl.load(idx_mapping + row)
    used = slot >= 0
    total = tl.load(total_len + slot, mask=used, other=0)
    total = tl.minimum(total, history_stride - REFERENCE)
    text = history + slot * history_stride
    note = notes + slot * 4
    d = tl.arange(0, DEPTH_PAD)
    observe(
        text, memory, segments, pending, note, used, total, d, history_stride,
        DEPTH, REFERENCE, LENGTHS,
    )  # fmt: skip

    # The best matches of all blocks.
    k = tl.arange(0, KEYS_PAD)
    key = tl.load(keys + row * KEYS + k, mask=(k < KEYS) & used, other=0)
    start = (key & PLACE_MASK) + 1
    later, found = tl.arange(0, ALIKE)[None, :], (key > 0)[:, None]
    following = tokens_behind(
        text, memory, segments, start[:, None], later, total, history_stride, found, REFERENCE
    )
    key = in_order(key, rates, memory, history_stride, REFERENCE, LENGTHS)
    path = tl.arange(0, PATHS_PAD)
    kept = tl.zeros([PATHS_PAD], tl.int32)
    for i in range(PATHS):
        best, key = best_key(key, following)
        kept = tl.where(path == i, best.to(tl.int32), kept)
    start = (kept & PLACE_MASK) + 1
    n = kept >> PLACE_BITS
    best_start = tl.sum(tl.where(path == 0, start, 0), 0)
    best_n = tl.sum(tl.where(path == 0, n, 0), 0)
    keep_note(note, used, best_start, best_n, total)
    if memory is not None:
        from_memory = ((n > 0) & is_remembered(start, history_stride)).to(tl.int32)
        tl.store(sources + row, tl.sum(from_memory << path, 0))

    is_match = n > 0
    rate = tl.load(rates + rate_of(n, start, history_stride, REFERENCE, LENGTHS))
    log_rate, log_other = tl.log(rate), tl.log(1.0 - rate)
    # Of two matches: whether their paths are one so far. Such a pair has one node at each depth,
    # which stands in the column of the better match, `node`.
    one = is_match[:, None] & is_match[None, :]
    earlier = path[None, :] < path[:, None]
    node = path * 0
    parent = path * 0 - 1
    score = tl.zeros([PATHS_PAD], tl.float32)
    ended = ~is_match
    for depth in range(DEPTH):
        token = tokens_behind(
            text, memory, segments, start, depth, total, history_stride, is_match, REFERENCE
        )
        ended = ended | (token < 0) | (token >= vocab_size)
        # A path that has ended is no longer one with a path that goes on, whatever its token.
        token = tl.where(ended, -1, token)
        siblings = one & earlier
        one = one & (token[:, None] == token[None, :])
        node = tl.min(tl.where(one, path[None, :], PATHS_PAD), 1)
        is_node = is_match & (node == path)
        # A child is drawn if none of its better siblings is.
        others = tl.where(is_node & ~ended, log_other, 0.0)
        own = tl.where(ended, UNLIKELY, log_rate)
        own += tl.sum(tl.where(siblings, others[None, :], 0.0), 1)
        score = tl.where(is_node, score + own, 0.0)
        # All matches of a node go on from its score.
        column = tl.where(path < PATHS, depth * PATHS + path, 0)
        tl.store(scores + column, tl.where(is_node, score, float("-inf")), mask=path < PATHS)
        tl.store(tokens + column, tl.maximum(token, 0).to(tl.int64), mask=path < PATHS)
        tl.store(parents + column, tl.where(is_node, parent, -1), mask=path < PATHS)
        score = tl.sum(tl.where(node[:, None] == path[None, :], score[None, :], 0.0), 1)
        parent = FIRST + depth * PATHS + node


def insert_paths(
    table: CandidateTable, state: NgramState, total_len: torch.Tensor, idx_mapping: torch.Tensor,
    num_reqs: int, *, first: int, depth: int, vocab_size: int,
) -> None:  # fmt: skip
    """Add the continuations of the best ``state.matches`` matches, as `insert_ngrams` does of one.

    Paths are one as far as their tokens are equal, as in the tries of SuffixDecoding (Oliaro et
    al., arXiv 2411.04975). A match of n tokens goes on with the rate of n, and its path is taken
    where the paths of better matches are not: a node's log-probability is that of the rate of its
    best match, and of ``1 - rate`` for each better sibling.

    Column ``first + (d - 1) * matches + m`` is the node of match ``m`` at depth ``d``. It has a
    score of -inf if a better match has the same node, or if there is no match ``m``. ``notes`` and
    ``pending`` are written for the best match alone. What is no token of the target is replaced by
    token 0, which ranks behind all others, and so does the path below it."""
    width, paths = table.scores.shape[1], state.matches
    if num_reqs == 0:
        return
    count = state.keys.shape[1]
    _paths_kernel[(num_reqs,)](
        *read_and_written(table, state, total_len, idx_mapping), vocab_size,
        WIDTH=width, FIRST=first, PATHS=paths, PATHS_PAD=next_power_of_2(paths), DEPTH=depth,
        DEPTH_PAD=next_power_of_2(depth), KEYS=count, KEYS_PAD=next_power_of_2(count),
        REFERENCE=state.reference, LENGTHS=state.lengths, num_warps=warps(count),
    )  # fmt: skip


def warps(keys: int) -> int:
    """Warps of a program that chooses among so many keys."""
    return 1 if keys <= 128 else 4 if keys <= 4096 else 8

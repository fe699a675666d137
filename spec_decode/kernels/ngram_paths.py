"""Puts the continuations of several matches among a request's candidates, as one tree."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.ngram_insert import (
    keep_note,
    observe,
    read_and_written,
)
from vllm_graft.spec_decode.kernels.ngram_match import (
    ALIKE,
    PLACE_BITS,
    PLACE_MASK,
    best_key,
    in_order,
    is_remembered,
    rate_of,
    tokens_behind,
)
from vllm_graft.spec_decode.kernels.sizes import next_power_of_2
from vllm_graft.spec_decode.trees.text_state import NgramState
from vllm_graft.spec_decode.trees.tree import CandidateTable, num_candidates

UNLIKELY = tl.constexpr(-1e20)
"""Log-probability of a token in the place of what is no token, such as a prompt's embedding."""


@Kernel
@triton.jit
def _paths_kernel(
    total_len,
    idx_mapping,
    history,
    notes,
    pending,
    rates,
    keys,
    memory,
    segments,
    sources,
    scores,
    tokens,
    parents,
    history_stride,
    vocab_size,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    PATHS: tl.constexpr,
    PATHS_PAD: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTH_PAD: tl.constexpr,
    KEYS: tl.constexpr,
    KEYS_PAD: tl.constexpr,
    REFERENCE: tl.constexpr,
    LENGTHS: tl.constexpr,
):
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
        text, memory, segments, start[:, None], later, total, history_stride, found,
        REFERENCE,
    )  # fmt: skip
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
            text, memory, segments, start, depth, total, history_stride, is_match,
            REFERENCE,
        )  # fmt: skip
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
    table: CandidateTable,
    state: NgramState,
    total_len: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_reqs: int,
    *,
    first: int,
    depth: int,
    vocab_size: int,
) -> None:
    """Add the continuations of the best ``state.matches`` matches, as `insert_ngrams` does of one.

    Paths are one as far as their tokens are equal, as in the tries of SuffixDecoding (Oliaro et
    al., arXiv 2411.04975). A match of n tokens goes on with the rate of n, and its path is taken
    where the paths of better matches are not: a node's log-probability is that of the rate of its
    best match, and of ``1 - rate`` for each better sibling.

    Column ``first + (d - 1) * matches + m`` is the node of match ``m`` at depth ``d``. It has a
    score of -inf if a better match has the same node, or if there is no match ``m``. ``notes`` and
    ``pending`` are written for the best match alone. What is no token of the target is replaced by
    token 0, which ranks behind all others, and so does the path below it.
    """
    width, paths = table.scores.shape[1], state.matches
    if not num_candidates(table.topk, 1) <= first <= width - depth * paths or depth < 1:
        raise ValueError(
            f"columns {first} to {first + depth * paths - 1} must lie behind the candidates of a "
            f"table with {width} columns"
        )
    if num_reqs == 0:
        return
    count = state.keys.shape[1]
    _paths_kernel[(num_reqs,)](
        *read_and_written(table, state, total_len, idx_mapping),
        vocab_size,
        WIDTH=width,
        FIRST=first,
        PATHS=paths,
        PATHS_PAD=next_power_of_2(paths),
        DEPTH=depth,
        DEPTH_PAD=next_power_of_2(depth),
        KEYS=count,
        KEYS_PAD=next_power_of_2(count),
        REFERENCE=state.reference,
        LENGTHS=state.lengths,
        num_warps=warps(count),
    )


def warps(keys: int) -> int:
    """Warps of a program that chooses among so many keys."""
    return 1 if keys <= 128 else 4 if keys <= 4096 else 8

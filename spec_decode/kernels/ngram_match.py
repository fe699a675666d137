"""Finds where the end of a request's text has occurred before; copies the text to the device."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.sizes import cdiv
from vllm_graft.spec_decode.trees.ngram_state import MAX_PLACE, NgramState, scan_block

PLACE_BITS = tl.constexpr(MAX_PLACE.bit_length() - 1)
"""Bits of a match's place in its key; the bits above them are its length."""

PLACE_MASK = tl.constexpr(MAX_PLACE - 1)
"""These bits."""

ALIKE = tl.constexpr(4)
"""Matches count as one if so many tokens that follow them are equal: the best of them is kept."""


@triton.jit
def _tokens(source, history, place, copied, mask):
    """Tokens at some places: those from `copied` on are in the engine's memory alone."""
    new = place >= copied
    fresh = tl.load(source + place, mask=mask & new, other=-1)
    known = tl.load(history + place, mask=mask & ~new, other=-1)
    return tl.where(new, fresh, known)


@triton.jit
def best_key(key, following):
    """The largest key, and the keys without those of all matches that are like it.

    Args:
        key: i32 ``[K]``, keys of matches, all different; 0 for none.
        following: i32 ``[K, ALIKE]``, the tokens that follow each match.
    """
    best = tl.max(key, 0)
    wanted = tl.sum(tl.where((key == best)[:, None], following, 0), 0)
    same = tl.min((following == wanted[None, :]).to(tl.int32), 1)
    return best, tl.where(same > 0, 0, key)


@triton.jit
def _clear(keys, MATCHES: tl.constexpr):
    for i in range(MATCHES):
        tl.store(keys + i, 0)


@triton.jit
def _match_kernel(
    source,
    total_len,
    idx_mapping,
    history,
    notes,
    keys,
    source_stride,
    history_stride,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    BLOCK: tl.constexpr,
    MATCHES: tl.constexpr,
):
    """Write the keys of the best matches that end in one block of one request's text."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(idx_mapping + row)
    used = slot >= 0
    total = tl.load(total_len + slot, mask=used, other=0)
    total = tl.minimum(total, history_stride)
    keys += (row * tl.num_programs(1) + block) * MATCHES
    if block * BLOCK < total:
        source += slot * source_stride
        history += slot * history_stride
        copied = tl.load(notes + 4 * slot)
        end = block * BLOCK + tl.arange(0, BLOCK)
        new = (end >= copied) & (end < total)
        tl.store(history + end, tl.load(source + end, mask=new, other=0), mask=new)
        # An earlier occurrence ends before the text does, so that a token follows it.
        alive = end < total - 1
        length = tl.zeros([BLOCK], tl.int32)
        n = 0
        # Most blocks hold the last token nowhere, or not with the one before it.
        while n < MAX_N:
            last = _tokens(source, history, total - 1 - n, copied, total - 1 - n >= 0)
            here = _tokens(source, history, end - n, copied, alive & (end >= n))
            alive = alive & (end >= n) & (here == last)
            length += alive.to(tl.int32)
            n = tl.where(tl.max(alive.to(tl.int32), 0) > 0, n + 1, MAX_N)
        key = tl.where(length >= MIN_N, (length << PLACE_BITS) | end, 0)
        if tl.max(key, 0) > 0:
            if MATCHES == 1:
                tl.store(keys, tl.max(key, 0))
            else:
                # Behind the end of the text come the tokens from the match on again.
                period = tl.maximum(total - 1 - end, 1)
                place = end[:, None] + 1 + tl.arange(0, ALIKE)[None, :] % period[:, None]
                following = _tokens(source, history, place, copied, (key > 0)[:, None])
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

    With ``state.matches`` more than one, the best matches of each block are found whose next
    `ALIKE` tokens differ.

    The idea is prompt lookup decoding (Saxena 2023; vLLM's ``ngram`` method). The text is scanned
    in blocks, one program each. As vLLM keeps it in host memory, tokens that are new are copied to
    the device in passing.

    Args:
        state: ``keys`` and ``history`` are written.
        source: i32 ``[max_reqs, >= width]`` by request-state index, the texts.
        total_len: i32 ``[max_reqs]``, tokens of each text.
        idx_mapping: i64 ``[num_reqs]``, request-state index; padding has a negative one.
        num_reqs: batch rows.
    """
    if num_reqs == 0:
        return
    width = state.history.shape[1]
    block = scan_block(width)
    _match_kernel[(num_reqs, cdiv(width, block))](
        source,
        total_len,
        idx_mapping,
        state.history,
        state.notes,
        state.keys,
        source.stride(0),
        width,
        MIN_N=state.min_n,
        MAX_N=state.max_n,
        BLOCK=block,
        MATCHES=state.matches,
        num_warps=4 if block > 512 else 1,
    )

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


@triton.jit
def _tokens(source, history, place, copied, mask):
    """Tokens at some places: those from `copied` on are in the engine's memory alone."""
    new = place >= copied
    fresh = tl.load(source + place, mask=mask & new, other=-1)
    known = tl.load(history + place, mask=mask & ~new, other=-1)
    return tl.where(new, fresh, known)


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
):
    """Write the key of the best match that ends in one block of one request's text; 0 for none."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot = tl.load(idx_mapping + row)
    used = slot >= 0
    total = tl.load(total_len + slot, mask=used, other=0)
    total = tl.minimum(total, history_stride)
    best = 0
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
        best = tl.max(tl.where(length >= MIN_N, (length << PLACE_BITS) | end, 0), 0)
    tl.store(keys + row * tl.num_programs(1) + block, best)


def match_ngrams(
    state: NgramState,
    source: torch.Tensor,
    total_len: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_reqs: int,
) -> None:
    """Find the longest suffix of each text that has occurred before; of equals, the last one.

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
        num_warps=4 if block > 512 else 1,
    )

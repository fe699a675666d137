"""Block tables of a window: the first block of each request, and its last ones.

A row that reads the paged cache by such a table sees the beginning of its text and the tokens right
before it (StreamingLLM, arXiv:2309.17453). Cached keys are rotated by their own positions already,
so that a table may leave blocks out, and every kernel that reads pages serves the window.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel

SINK_BLOCKS = 1
"""Blocks at the beginning of a text that are always seen."""

_PIECE = 128


def table_width(window: int, max_rows: int, block_size: int) -> int:
    """Entries that a request's table of a window needs at most; see `windowed_table`."""
    # The first token and the last one may share their blocks with others.
    return SINK_BLOCKS + (window + max_rows - 1) // block_size + 2


@Kernel
@triton.jit(do_not_specialize=["window", "table_stride", "table_blocks", "out_stride", "out_width"])
def _window_kernel(
    table,
    kv_lens,
    query_start_loc,
    out_table,
    out_lens,
    window,
    table_stride,
    table_blocks,
    out_stride,
    out_width,
    BLOCK_SIZE: tl.constexpr,
    SINK: tl.constexpr,
    PIECE: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    kv_len = tl.load(kv_lens + req)
    rows = 0
    if query_start_loc is not None:
        rows = tl.load(query_start_loc + req + 1) - tl.load(query_start_loc + req)
    first = tl.maximum(kv_len - rows - window, 0) // BLOCK_SIZE
    dropped = tl.maximum(first - SINK, 0)
    # Only requests of dummy batches have more keys than there is room for.
    kept = tl.minimum(kv_len - dropped * BLOCK_SIZE, out_width * BLOCK_SIZE)
    used = tl.cdiv(kept, BLOCK_SIZE)
    for start in range(0, out_width, PIECE):
        at = start + tl.arange(0, PIECE)
        source = at + tl.where(at < SINK, 0, dropped)
        exists = (at < used) & (source < table_blocks)
        block = tl.load(table + req * table_stride + source, mask=exists, other=0)
        tl.store(out_table + req * out_stride + at, block, mask=at < out_width)
    tl.store(out_lens + req, kept)


def windowed_table(
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    *,
    window: int,
    max_rows: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks that a request's rows see: the first, and those of a window before its first row.

    No device value is read on the host, so the call can be captured.

    Args:
        block_table: int32 ``[num_reqs, max_blocks]``.
        kv_lens: int32 ``[>= num_reqs]``, keys of each request, including those of its rows.
        query_start_loc: int32 ``[>= num_reqs + 1]``; None if no row has its keys in the cache.
        window: tokens that are seen before a request's first row, at least; more of them as far as
            their block begins earlier.
        max_rows: upper bound of a request's rows whose keys are in the cache.

    Returns:
        int32 ``[num_reqs, width]``, block 0 where no key is, and the keys among these blocks.
    """
    num_reqs, table_blocks = block_table.shape
    width = min(table_width(window, max_rows, block_size), table_blocks)
    table = block_table.new_empty(num_reqs, width)
    lens = kv_lens.new_empty(num_reqs)
    if num_reqs:
        _window_kernel[(num_reqs,)](
            block_table,
            kv_lens,
            query_start_loc,
            table,
            lens,
            window,
            block_table.stride(0),
            table_blocks,
            table.stride(0),
            width,
            BLOCK_SIZE=block_size,
            SINK=SINK_BLOCKS,
            PIECE=_PIECE,
            num_warps=1,
        )
    return table, lens

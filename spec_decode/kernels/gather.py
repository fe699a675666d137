"""Moves the accepted rows of a step to the front of their request's rows."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import cdiv, moved_block, next_power_of_2


class TokenRows(NamedTuple):
    """The rows of a batch, as the draft's extend pass reads them.

    Attributes:
        ids: i32 or i64 ``[num_tokens]``.
        positions: i64 ``[num_tokens]``.
        states: ``[num_tokens, hidden]``, the last dimension contiguous.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    states: torch.Tensor


@Kernel
@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def _follow_kernel(
    path,
    num_sampled,
    query_start_loc,
    num_draft_tokens,
    ids,
    positions,
    states,
    moved_ids,
    moved_positions,
    moved_states,
    num_reqs,
    num_tokens,
    path_stride,
    states_stride,
    moved_stride,
    WIDTH: tl.constexpr,
    REQS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Move a block of rows and columns; the first block of a row also moves ids and positions."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < num_tokens
    # The request of a row is the number of queries that end before it. Rows after the last query
    # are padding.
    other = tl.arange(0, REQS_PAD)
    ends = tl.load(query_start_loc + 1 + other, mask=other < num_reqs, other=2147483647)
    req = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
    query = req < num_reqs
    end = tl.load(query_start_loc + 1 + req, mask=query, other=0)
    drafts = tl.load(num_draft_tokens + req, mask=query, other=0)
    accepted = tl.load(num_sampled + req, mask=query & (drafts > 0), other=0)
    first = end - drafts - 1
    place = token - first
    moved = (place >= 0) & (place < accepted)
    node = tl.load(path + req.to(tl.int64) * path_stride + place, mask=moved, other=0)
    source = tl.where(moved, first + node, token).to(tl.int64)

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    element = inside[:, None] & (column < WIDTH)[None, :]
    found = tl.load(states + source[:, None] * states_stride + column[None, :], mask=element)
    place_of = token.to(tl.int64)[:, None] * moved_stride + column[None, :]
    tl.store(moved_states + place_of, found, mask=element)
    here = inside & (tl.program_id(1) == 0)
    tl.store(moved_ids + token, tl.load(ids + source, mask=here), mask=here)
    tl.store(moved_positions + token, tl.load(positions + source, mask=here), mask=here)


def follow_path(
    path: torch.Tensor,
    num_sampled: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    rows: TokenRows,
    moved: TokenRows,
    *,
    num_reqs: int,
    num_tokens: int,
    max_reqs: int,
) -> None:
    """Copy rows so that accepted nodes stand in order after their root, in one launch.

    Row ``t`` stays row ``t`` except for the draft rows of a request, where row ``first + d`` is
    row ``first + path[d]`` for ``d < num_sampled``.

    Args:
        path: i32 ``[>= num_reqs, width]`` by batch row, from ``walk_tree``.
        num_sampled: i32 ``[num_reqs]``.
        query_start_loc: i32 ``[>= num_reqs + 1]``.
        num_draft_tokens: i32 ``[num_reqs]``, 0 for a plain request.
        rows: The batch's rows.
        moved: Receives the copies; shares no memory with `rows`, and may be longer.
        num_reqs: Batch rows.
        num_tokens: Rows, including those after the last query (padding).
        max_reqs: Upper bound of ``num_reqs``, the same in each call of an engine.

    Raises:
        ValueError: if shapes or strides are not these.
    """
    width = rows.states.shape[1]
    for name, each in (("rows", rows), ("moved", moved)):
        if each.states.shape[1] != width or each.states.stride(1) != 1:
            raise ValueError(
                f"{name}.states must be [num_tokens, {width}] with contiguous rows: "
                f"{tuple(each.states.shape)}, strides {each.states.stride()}"
            )
        if min(len(tensor) for tensor in each) < num_tokens:
            raise ValueError(f"{name} must have {num_tokens} rows: {[len(t) for t in each]}")
    if num_tokens == 0:
        return
    block_rows, columns = moved_block(width)
    _follow_kernel[(cdiv(num_tokens, block_rows), cdiv(width, columns))](
        path,
        num_sampled,
        query_start_loc,
        num_draft_tokens,
        *rows,
        *moved,
        num_reqs,
        num_tokens,
        path.stride(0),
        rows.states.stride(0),
        moved.states.stride(0),
        WIDTH=width,
        REQS_PAD=next_power_of_2(max_reqs),
        ROWS=block_rows,
        COLUMNS=columns,
        num_warps=4,
    )

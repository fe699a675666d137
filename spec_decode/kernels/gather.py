"""Moving the accepted rows of a step to the front of their request's rows."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def _path_index_kernel(
    path,
    num_sampled,
    query_start_loc,
    num_draft_tokens,
    index,
    num_reqs,
    num_tokens,
    path_stride,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    begin = tl.load(query_start_loc + req)
    # One program more than requests: it writes the padding behind the last query.
    end = num_tokens
    first = num_tokens
    accepted = 0
    if req < num_reqs:
        end = tl.load(query_start_loc + req + 1)
        drafts = tl.load(num_draft_tokens + req)
        if drafts > 0:
            first = end - drafts - 1
            accepted = tl.load(num_sampled + req)
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        place = token - first
        moved = (place >= 0) & (place < accepted)
        node = tl.load(path + req.to(tl.int64) * path_stride + place, mask=moved, other=0)
        source = tl.where(moved, first + node, token)
        tl.store(index + token, source.to(tl.int64), mask=token < end)


def path_index(
    path: torch.Tensor,
    num_sampled: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    index: torch.Tensor,
    num_reqs: int,
    num_tokens: int,
) -> None:
    """Index that gathers rows so that accepted nodes stand in order behind their root.

    ``index[t] = t`` except for the draft rows of a request, where
    ``index[first + d] = first + path[d]`` for ``d < num_sampled``.

    Args:
        path: i32 ``[>= num_reqs, width]`` by batch row, from ``walk_tree``.
        num_sampled: i32 ``[num_reqs]``.
        query_start_loc: i32 ``[>= num_reqs + 1]``.
        num_draft_tokens: i32 ``[num_reqs]``, 0 for a plain request.
        index: i64 ``[>= num_tokens]``, written up to ``num_tokens``.
        num_reqs: Batch rows.
        num_tokens: Rows, those behind the last query (padding) included.
    """
    _path_index_kernel[(num_reqs + 1,)](
        path,
        num_sampled,
        query_start_loc,
        num_draft_tokens,
        index,
        num_reqs,
        num_tokens,
        path.stride(0),
        BLOCK=256,
        num_warps=2,
    )

"""States of a head in blocks, where each row of a tree continues its parent's."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def request_of(req, query_start_loc, num_accepted, columns, column_stride):
    """Where a request's rows and states are.

    Args:
        req: the request.
        query_start_loc: first row of each request.
        num_accepted: places of the columns with the states before the rows, counted from 1.
        columns: blocks of all requests' rows.
        column_stride: elements between requests.

    Returns:
        The first row and the number of rows; the blocks of the request's rows; the block of the
        state before them. That is 0, vLLM's null block, where there is nothing to do: in padding of
        a graph, and without rows.
    """
    first = tl.load(query_start_loc + req).to(tl.int64)
    num_rows = tl.load(query_start_loc + req + 1) - first
    columns += req * column_stride
    accepted = tl.load(num_accepted + req, mask=num_rows > 0, other=1)
    before = tl.load(columns + accepted - 1, mask=num_rows > 0, other=0).to(tl.int64)
    return first, num_rows, columns, before


@triton.jit
def continued(state, row, parent, states, columns, block_stride, place, mask):
    """The state that a row continues: `state` behind the row before, or its parent's, read back.

    Args:
        state: f32, of the row before; of what precedes the tree for its first row.
        row: the row, counted from the first one of its request.
        parent: the row that it continues, likewise; -1 for the first one.
        states: blocks of states.
        columns: blocks of the request's rows.
        block_stride: elements between blocks.
        place: of the state's elements in a block.
        mask: which of these exist.
    """
    if (parent >= 0) & (parent != row - 1):
        # Other threads of this program may have stored what this one loads.
        tl.debug_barrier()
        source = tl.load(columns + parent).to(tl.int64)
        state = tl.load(states + source * block_stride + place, mask=mask, other=0).to(tl.float32)
    return state


@triton.jit
def keep(state, row, states, columns, block_stride, place, mask):
    """Store the state of a row in the row's block; block 0 keeps nothing.

    Args:
        state: f32, of the row.
        row: as in `continued`.
        states: likewise.
        columns: likewise.
        block_stride: likewise.
        place: likewise.
        mask: likewise.
    """
    target = tl.load(columns + row).to(tl.int64)
    if target > 0:
        tl.store(states + target * block_stride + place, state, mask=mask)


def require_contiguous(states: torch.Tensor, outputs: torch.Tensor) -> None:
    """Refuse tensors whose elements the kernels would not find.

    Args:
        states: ``[num_blocks, heads, V, K]``.
        outputs: ``[num_rows, heads, V]``.

    Raises:
        ValueError: if they are not contiguous within a block and a row.
    """
    _, _, value, key = states.shape
    if states.stride()[1:] != (value * key, key, 1) or outputs.stride()[1:] != (value, 1):
        raise ValueError(
            f"states and outputs must be contiguous within a block and a row, got strides "
            f"{states.stride()} and {outputs.stride()}"
        )

"""Notes which rows of a pass are kept as inputs, and their ancestors."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import next_power_of_2
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_inputs import KeptRows
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows

MAX_ROWS = 64
"""Rows of a request whose ancestors fit the bits of an integer."""


@Kernel
@triton.jit
def _keep_rows_kernel(
    query_start_loc,
    num_accepted,
    parents,
    batch_rows,
    firsts,
    accepted,
    masks,
    ROWS: tl.constexpr,
):
    req = tl.program_id(0)
    first = tl.load(query_start_loc + req)
    num_rows = tl.load(query_start_loc + req + 1) - first
    if num_rows <= 0:
        return
    row = tl.arange(0, ROWS)
    inside = row < num_rows
    ancestor = tl.where(inside, row, -1)
    found = tl.zeros([ROWS], tl.int64)
    for _ in range(0, num_rows):
        bit = tl.full([ROWS], 1, tl.int64) << tl.maximum(ancestor, 0).to(tl.int64)
        found |= tl.where(ancestor >= 0, bit, 0)
        ancestor = tl.load(parents + first + ancestor, mask=ancestor >= 0, other=-1)
    tl.store(masks + first + row, found, mask=inside)
    place = first.to(tl.int64)
    if batch_rows is not None:
        place = tl.load(batch_rows + first).to(tl.int64)
    tl.store(firsts + place, first)
    tl.store(accepted + place, tl.load(num_accepted + req))


def keep_rows(
    kept: KeptRows, which: RecurrentRows, batch_rows: torch.Tensor | None, rows: int
) -> None:
    """Note that the rows of trees in a pass are kept as inputs.

    Args:
        kept: what is noted.
        which: the rows, as many as a buffer holds at most.
        batch_rows: i32 or i64 ``[num_rows]``, the rows' places in the batch; None if they lead it.
        rows: most rows of a request, `MAX_ROWS` at most.
    """
    if which.num_reqs == 0:
        return
    _keep_rows_kernel[(which.num_reqs,)](
        which.query_start_loc,
        which.num_accepted,
        which.parents,
        batch_rows,
        kept.firsts,
        kept.accepted,
        kept.masks,
        ROWS=next_power_of_2(rows),
        num_warps=1,
    )

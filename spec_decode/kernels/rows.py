"""Writes what the target's pass needs to know about each row: its position and its ancestors."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import next_power_of_2
from vllm_graft.spec_decode.trees.topology import TreeState

MASK_BITS = 64


@dataclass(frozen=True)
class TreeRows:
    """Which rows of a batch belong to trees, and what each of them sees. Addresses are stable.

    The ``row_`` tensors are ``[max_tokens]``, the others ``[max_reqs]`` by batch row.

    Attributes:
        num_drafts: i32, as all others but the masks; 0 for a plain request.
        row_masks: i64; bit ``j`` is set if the row sees the request's ``j``-th tree row.
        row_depths: position of each row behind the first of its request's rows that the tree kernel
            computes.
        row_parents: the row that comes before each row on its path, counted from its request's
            first row; -1 for that one. Rows of longer plain queries than the kernel computes keep
            old ones.
        num_rows: how many of the query's last rows the tree kernel computes.
        prefix_lens: keys before these rows; 0 without such rows.
        plain_lens: keys that the platform's attention reads: 0 where all rows belong to a tree, so
            that it skips them.
    """

    num_drafts: torch.Tensor
    row_masks: torch.Tensor
    row_depths: torch.Tensor
    row_parents: torch.Tensor
    num_rows: torch.Tensor
    prefix_lens: torch.Tensor
    plain_lens: torch.Tensor

    @classmethod
    def allocate(cls, max_reqs: int, max_tokens: int, device: torch.device | str) -> TreeRows:
        def per_request() -> torch.Tensor:
            return torch.zeros(max_reqs, dtype=torch.int32, device=device)

        masks = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        depths, parents = torch.zeros(2, max_tokens, dtype=torch.int32, device=device)
        return cls(
            per_request(), masks, depths, parents, per_request(), per_request(), per_request()
        )

    def clear(self) -> None:
        """Leave every request without tree rows and without keys for the platform's attention."""
        for lengths in (self.num_rows, self.prefix_lens, self.plain_lens):
            lengths.zero_()


@Kernel
@triton.jit(do_not_specialize=["num_reqs", "max_rows"])
def _rows_kernel(
    tree_parents,
    tree_depths,
    tree_masks,
    idx_mapping,
    query_start_loc,
    cu_num_logits,
    num_computed,
    num_drafts,
    positions,
    row_masks,
    row_depths,
    row_parents,
    num_rows,
    prefix_lens,
    plain_lens,
    num_reqs,
    max_rows,
    tree_stride,
    PLAIN_ROWS: tl.constexpr,
    ROWS_PAD: tl.constexpr,
):
    req = tl.program_id(0)
    if req >= num_reqs:
        tl.store(num_rows + req, 0)
        tl.store(prefix_lens + req, 0)
        tl.store(plain_lens + req, 0)
        return
    start = tl.load(query_start_loc + req).to(tl.int64)
    length = tl.load(query_start_loc + req + 1) - start
    drafts = tl.load(cu_num_logits + req + 1) - tl.load(cu_num_logits + req) - 1
    tl.store(num_drafts + req, drafts)
    slot = tl.load(idx_mapping + req)
    computed = tl.load(num_computed + slot).to(tl.int64)
    keys = tl.where(length == drafts + 1, 0, computed + length)
    tl.store(plain_lens + req, tl.where(drafts > 0, keys, computed + length).to(tl.int32))
    row = tl.arange(0, ROWS_PAD)
    causal = (tl.full([ROWS_PAD], 2, tl.int64) << row.to(tl.int64)) - 1
    if drafts > 0:
        inside = row <= drafts
        first = start + length - drafts - 1
        depth = tl.load(tree_depths + slot * tree_stride + row, mask=inside, other=0)
        mask = tl.load(tree_masks + slot * tree_stride + row, mask=inside, other=0)
        parent = tl.load(tree_parents + slot * tree_stride + row, mask=inside, other=0)
        base = computed + length - drafts - 1
        tl.store(positions + first + row, base + depth, mask=inside)
        tl.store(row_masks + first + row, mask & causal, mask=inside)
        tl.store(row_depths + first + row, depth, mask=inside)
        parent += (first - start).to(tl.int32)
        tl.store(row_parents + first + row, parent, mask=inside)
        tl.store(num_rows + req, drafts + 1)
        tl.store(prefix_lens + req, base.to(tl.int32))
    else:
        fits = length <= max_rows
        tl.store(row_masks + start + row, causal, mask=(row < length) & fits)
        tl.store(row_depths + start + row, row, mask=(row < length) & fits)
        tl.store(row_parents + start + row, row - 1, mask=(row < length) & fits)
        rows = 0
        prefix = 0
        if PLAIN_ROWS:
            rows = tl.where(fits, length, 0).to(tl.int32)
            prefix = tl.where(fits, computed, 0).to(tl.int32)
        tl.store(num_rows + req, rows)
        tl.store(prefix_lens + req, prefix)


class VerifiedBatch(Protocol):
    """The members of the engine's batch that are read here, as vLLM has them.

    A request has one more logits row than drafts. Of a graph's ``num_reqs_after_padding`` batch
    rows, those behind ``num_reqs`` get 0 rows.
    """

    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    cu_num_logits: torch.Tensor
    positions: torch.Tensor
    num_reqs: int
    num_reqs_after_padding: int


def prepare_rows(
    tree: TreeState,
    batch: VerifiedBatch,
    num_computed: torch.Tensor,
    rows: TreeRows,
    *,
    plain_rows: bool = False,
    max_rows: int = MASK_BITS,
) -> None:
    """Write the positions and masks of the rows that the tree attention kernel computes.

    A request with ``n > 0`` drafts has the root and its first ``n`` nodes in the last ``n + 1``
    rows of its query, whose positions become base + depth. A plain request of at most ``max_rows``
    rows gets causal masks; a longer one is left to the platform's attention.

    Args:
        tree: topology by request-state index.
        batch: its positions of tree rows are overwritten.
        num_computed: i32 ``[max_reqs]`` by request-state index, tokens before the query.
        rows: receives what attention reads.
        plain_rows: whether the tree kernel also computes plain requests that fit, as it must where
            a FULL graph holds no other attention.
        max_rows: 1 to 64, else a ValueError is raised.
    """
    if not 1 <= max_rows <= MASK_BITS:
        raise ValueError(f"max_rows must be 1 to {MASK_BITS}, got {max_rows}")
    if batch.num_reqs_after_padding == 0:
        return
    _rows_kernel[(batch.num_reqs_after_padding,)](
        tree.parents,
        tree.depths,
        tree.masks,
        batch.idx_mapping,
        batch.query_start_loc,
        batch.cu_num_logits,
        num_computed,
        rows.num_drafts,
        batch.positions,
        rows.row_masks,
        rows.row_depths,
        rows.row_parents,
        rows.num_rows,
        rows.prefix_lens,
        rows.plain_lens,
        batch.num_reqs,
        max_rows,
        tree.width,
        PLAIN_ROWS=plain_rows,
        ROWS_PAD=next_power_of_2(max(tree.width, max_rows)),
        num_warps=1,
    )

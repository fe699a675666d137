"""Memory for attention that shows what must not be read, and outputs that show what was written."""

from __future__ import annotations

import torch

from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.trees.batch import (
    DraftBatch,
    LatentBatch,
    LatentDraftBatch,
    TreeBatch,
)

Batch = TreeBatch | DraftBatch | LatentBatch | LatentDraftBatch


def nan_space(batch: Batch, max_splits: int) -> AttentionWorkspace:
    """A workspace for a batch, full of NaN: memory that no split has written must not be read."""
    query = batch.query
    rows = batch.topk if isinstance(batch, DraftBatch | LatentDraftBatch) else batch.max_rows
    heads, size = query.shape[1:]
    space = AttentionWorkspace.allocate(batch.num_reqs, rows, heads, size, max_splits, query.device)
    for tensor in (space.acc, space.peak, space.total):
        tensor.fill_(float("nan"))
    return space


def check_rows(out: torch.Tensor, wanted: torch.Tensor, relative: float) -> None:
    """Check that each row and head is right relative to its norm, and nothing else is written.

    Args:
        out: ``[num_tokens, num_heads, size]``; NaN where nothing was written.
        wanted: f32, likewise.
        relative: largest norm of a row's error over that of the row.
    """
    assert torch.equal(out.isnan(), wanted.isnan())
    error = (out.float() - wanted).nan_to_num().norm(dim=-1)
    size = wanted.nan_to_num().norm(dim=-1)
    assert (error <= relative * size).all(), f"{(error / size).nan_to_num().max():.4f}"


def nans(query: torch.Tensor) -> torch.Tensor:
    """An output for a query, in which rows that nothing has written are NaN."""
    return torch.full_like(query, float("nan"), memory_format=torch.contiguous_format)

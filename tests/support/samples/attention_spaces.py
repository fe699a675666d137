"""Memory for attention that shows what must not be read, and outputs that show what was written."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from tests.support.references.tree_reference import tree_attention_reference
from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.kernels.attention.tree_attention import tree_attention
from vllm_graft.spec_decode.trees.batch import DraftBatch, LatentBatch, LatentDraftBatch, TreeBatch

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


def wanted_of(problem: TreeBatch | DraftBatch) -> torch.Tensor:
    """The plain result in float32 of the same inputs; NaN where nothing is computed."""
    query = problem.query
    out = torch.full(query.shape, float("nan"), device=query.device)
    tree_attention_reference(problem, out)
    return out


def attend(
    problem: TreeBatch | DraftBatch,
    max_splits: int,
    dtype: torch.dtype = torch.bfloat16,
    **how: Any,
) -> torch.Tensor:
    """The kernel's output, NaN where nothing is computed; the workspace holds NaN before."""
    query, space = problem.query, nan_space(problem, max_splits)
    out = torch.full(query.shape, float("nan"), dtype=dtype, device=query.device)
    tree_attention(problem, out, workspace=space, **how)
    return out


def captured(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture the call in a graph; it is compiled before."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


SmallBatch = TypeVar("SmallBatch", TreeBatch, DraftBatch)

QUERY_SCALE = 0.3
"""No power of 2, so that a product with it is rounded in 16 bits."""


def with_small_query(problem: SmallBatch) -> SmallBatch:
    """The problem with its query in e4m3, and a scale."""
    scale = torch.tensor(QUERY_SCALE, device=problem.query.device)
    query = (problem.query.float() / scale).to(torch.float8_e4m3fn)
    return replace(problem, query=query, q_scale=scale)


def converted(problem: SmallBatch) -> SmallBatch:
    """The same, converted to bfloat16 as a layer does where kernels take no e4m3 query."""
    assert problem.q_scale is not None
    query = problem.query.to(torch.bfloat16) * problem.q_scale.to(torch.bfloat16)
    return replace(problem, query=query, q_scale=None)

"""Grows the candidate table by one level: scores the children, keeps the best as the frontier."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import next_power_of_2
from vllm_graft.spec_decode.kernels.topk import NONE, best_of, ordered, unordered
from vllm_graft.spec_decode.trees.candidates import CandidateTable


@Kernel
@triton.jit
def _seed_kernel(
    logp,
    root_tokens,
    scores,
    tokens,
    parents,
    frontier_scores,
    frontier_candidates,
    ancestors,
    next_tokens,
    logp_stride,
    token_stride,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    HAS_NEXT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, TOPK_PAD)
    inside = c < TOPK
    score = tl.load(logp + row * logp_stride + c, mask=inside, other=0.0)
    token = tl.load(root_tokens + row * token_stride + c, mask=inside, other=0)
    tl.store(scores + row * WIDTH + c, score, mask=inside)
    tl.store(tokens + row * WIDTH + c, token, mask=inside)
    tl.store(parents + row * WIDTH + c, tl.full([TOPK_PAD], -1, tl.int32), mask=inside)
    tl.store(frontier_scores + row * TOPK + c, score, mask=inside)
    tl.store(frontier_candidates + row * TOPK + c, c, mask=inside)
    tl.store(ancestors + (row * TOPK + c) * STEPS, c, mask=inside)
    if HAS_NEXT:
        tl.store(next_tokens + row * TOPK + c, token, mask=inside)


@Kernel
@triton.jit(do_not_specialize=["level"])
def _expand_kernel(
    child_logp,
    child_tokens,
    scores,
    tokens,
    parents,
    frontier_scores,
    frontier_candidates,
    ancestors,
    next_tokens,
    parent_rows,
    logp_stride,
    logp_node_stride,
    token_stride,
    token_node_stride,
    level,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    STEPS_PAD: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    CHILDREN_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, CHILDREN_PAD)
    inside = child < TOPK * TOPK
    f = child // TOPK
    c = child % TOPK
    score = tl.load(frontier_scores + row * TOPK + f, mask=inside, other=0.0)
    child_logp += row * logp_stride
    child_tokens += row * token_stride
    score += tl.load(child_logp + f * logp_node_stride + c, mask=inside, other=0.0)
    token = tl.load(child_tokens + f * token_node_stride + c, mask=inside, other=0)
    parent = tl.load(frontier_candidates + row * TOPK + f, mask=inside, other=0)
    first = TOPK + (level - 1) * TOPK * TOPK
    tl.store(scores + row * WIDTH + first + child, score, mask=inside)
    tl.store(tokens + row * WIDTH + first + child, token, mask=inside)
    tl.store(parents + row * WIDTH + first + child, parent, mask=inside)

    best_order, best = best_of(tl.where(inside, ordered(score), NONE), child, TOPK, TOPK_PAD)
    best_score = unordered(best_order)
    j = tl.arange(0, TOPK_PAD)
    kept = j < TOPK
    f = best // TOPK
    step = tl.arange(0, STEPS_PAD)
    line = tl.load(
        ancestors + (row * TOPK + f[:, None]) * STEPS + step[None, :],
        mask=kept[:, None] & (step[None, :] < level),
        other=0,
    )
    line = tl.where(step[None, :] == level, level * TOPK + j[:, None], line)
    picked = tl.load(child_tokens + f * token_node_stride + best % TOPK, mask=kept, other=0)
    # The old frontier must be read by every thread before any thread overwrites it.
    tl.debug_barrier()
    tl.store(
        ancestors + (row * TOPK + j[:, None]) * STEPS + step[None, :],
        line,
        mask=kept[:, None] & (step[None, :] <= level),
    )
    tl.store(frontier_scores + row * TOPK + j, best_score, mask=kept)
    tl.store(frontier_candidates + row * TOPK + j, first + best, mask=kept)
    tl.store(next_tokens + row * TOPK + j, picked, mask=kept)
    tl.store(parent_rows + row * TOPK + j, row * TOPK + f, mask=kept)


def seed_frontier(
    table: CandidateTable,
    logp: torch.Tensor,
    tokens: torch.Tensor,
    num_reqs: int,
    next_tokens: torch.Tensor | None = None,
) -> None:
    """Write level 0: the children of the root are the first candidates and the first frontier.

    `logp` f32 and `tokens` i64 are ``[num_reqs, topk]``; `next_tokens`, i32 or i64
    ``[>= num_reqs * topk]``, receives the tokens.
    """
    if num_reqs == 0:
        return
    _check_last_contiguous(logp, tokens)
    _seed_kernel[(num_reqs,)](
        logp,
        tokens,
        table.scores,
        table.tokens,
        table.parents,
        table.frontier_scores,
        table.frontier_candidates,
        table.ancestors,
        next_tokens,
        logp.stride(0),
        tokens.stride(0),
        WIDTH=table.scores.shape[1],
        STEPS=table.steps,
        TOPK=table.topk,
        TOPK_PAD=next_power_of_2(table.topk),
        HAS_NEXT=next_tokens is not None,
        num_warps=1,
    )


def expand_frontier(
    table: CandidateTable,
    level: int,
    child_logp: torch.Tensor,
    child_tokens: torch.Tensor,
    num_reqs: int,
    next_tokens: torch.Tensor,
    parent_rows: torch.Tensor,
) -> None:
    """Write a level >= 1: add the ``topk`` children of each frontier node, keep the best ``topk``.

    The new frontier is ordered by score, highest first, ties by lower candidate index.
    Scores may be -inf (padding) but not NaN.

    Args:
        table: its frontier must be that of ``level - 1``.
        child_logp: f32 ``[num_reqs * topk, topk]``; row ``r * topk + f`` belongs to frontier node
            ``f`` of batch row ``r``. Or ``[num_reqs, topk, topk]``, where a stride may be 0: all
            nodes of a frontier then have the same children.
        child_tokens: i64, of either form.
        next_tokens: i32 or i64 ``[>= num_reqs * topk]``, receives the tokens of the new frontier.
        parent_rows: i64 ``[>= num_reqs * topk]``, receives the row (as in ``child_logp``) of each
            new frontier node's parent, by which hidden states are gathered.

    Raises:
        ValueError: if the level is out of range, or a last dimension is not contiguous.
    """
    if not 1 <= level < table.steps:
        raise ValueError(f"level must be 1 to {table.steps - 1}, got {level}")
    if num_reqs == 0:
        return
    _check_last_contiguous(child_logp, child_tokens)
    logp, ids = (
        each if each.dim() == 3 else each.unflatten(0, (num_reqs, table.topk))
        for each in (child_logp, child_tokens)
    )
    _expand_kernel[(num_reqs,)](
        logp,
        ids,
        table.scores,
        table.tokens,
        table.parents,
        table.frontier_scores,
        table.frontier_candidates,
        table.ancestors,
        next_tokens,
        parent_rows,
        logp.stride(0),
        logp.stride(1),
        ids.stride(0),
        ids.stride(1),
        level,
        WIDTH=table.scores.shape[1],
        STEPS=table.steps,
        STEPS_PAD=next_power_of_2(table.steps),
        TOPK=table.topk,
        TOPK_PAD=next_power_of_2(table.topk),
        CHILDREN_PAD=next_power_of_2(table.topk**2),
        num_warps=1 if table.topk <= 8 else 4,
    )


def _check_last_contiguous(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last dimension must be contiguous, strides {tensor.stride()}")

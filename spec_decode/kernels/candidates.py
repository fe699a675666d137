"""Grows the table of candidates level by level, and makes its best ones the tree."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.kernel_launch import (
    Kernel,
    cdiv,
    check_rows,
    next_power_of_2,
    rank_block,
)
from vllm_graft.spec_decode.kernels.topk import NONE, best_of, ordered, unordered
from vllm_graft.spec_decode.trees.tree import MAX_NODES, CandidateTable, TreeState, num_candidates


@Kernel
@triton.jit
def _seed_kernel(
    logp, root_tokens, scores, tokens, parents, frontier_scores, frontier_candidates, ancestors,
    next_tokens, logp_stride, token_stride,
    WIDTH: tl.constexpr, STEPS: tl.constexpr, TOPK: tl.constexpr, TOPK_PAD: tl.constexpr,
    HAS_NEXT: tl.constexpr,
):  # fmt: skip
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
    child_logp, child_tokens, scores, tokens, parents, frontier_scores, frontier_candidates,
    ancestors, next_tokens, parent_rows,
    logp_stride, logp_node_stride, token_stride, token_node_stride, level,
    WIDTH: tl.constexpr, STEPS: tl.constexpr, STEPS_PAD: tl.constexpr, TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr, CHILDREN_PAD: tl.constexpr,
):  # fmt: skip
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
    `logp` f32 and `tokens` i64 are ``[num_reqs, topk]``; `next_tokens`, i32 or i64 ``[>= num_reqs *
    topk]``, receives the tokens."""
    if num_reqs == 0:
        return
    check_rows(logp, tokens)
    _seed_kernel[(num_reqs,)](
        logp, tokens, table.scores, table.tokens, table.parents, table.frontier_scores,
        table.frontier_candidates, table.ancestors, next_tokens,
        logp.stride(0), tokens.stride(0),
        WIDTH=table.scores.shape[1], STEPS=table.steps, TOPK=table.topk,
        TOPK_PAD=next_power_of_2(table.topk), HAS_NEXT=next_tokens is not None, num_warps=1,
    )  # fmt: skip


def expand_frontier(
    table: CandidateTable, level: int, child_logp: torch.Tensor, child_tokens: torch.Tensor,
    num_reqs: int, next_tokens: torch.Tensor, parent_rows: torch.Tensor,
) -> None:  # fmt: skip
    """Write a level >= 1: add the ``topk`` children of each frontier node, keep the best ``topk``.

    The new frontier is ordered by score, highest first, ties by lower candidate index. Scores may
    be -inf (padding) but not NaN. Raises `ValueError` if a last dimension is not contiguous.

    Args:
        table: its frontier must be that of ``level - 1``.
        child_logp: f32 ``[num_reqs * topk, topk]``; row ``r * topk + f`` belongs to frontier node
            ``f`` of batch row ``r``. Or ``[num_reqs, topk, topk]``, where a stride may be 0: all
            nodes of a frontier then have the same children.
        child_tokens: i64, of either form.
        next_tokens: i32 or i64 ``[>= num_reqs * topk]``, receives the tokens of the new frontier.
        parent_rows: i64 ``[>= num_reqs * topk]``, receives the row (as in ``child_logp``) of each
            new frontier node's parent, by which hidden states are gathered.
    """
    if num_reqs == 0:
        return
    check_rows(child_logp, child_tokens)
    logp, ids = (
        each if each.dim() == 3 else each.unflatten(0, (num_reqs, table.topk))
        for each in (child_logp, child_tokens)
    )
    _expand_kernel[(num_reqs,)](
        logp, ids, table.scores, table.tokens, table.parents, table.frontier_scores,
        table.frontier_candidates, table.ancestors, next_tokens, parent_rows,
        logp.stride(0), logp.stride(1), ids.stride(0), ids.stride(1), level,
        WIDTH=table.scores.shape[1], STEPS=table.steps, STEPS_PAD=next_power_of_2(table.steps),
        TOPK=table.topk, TOPK_PAD=next_power_of_2(table.topk),
        CHILDREN_PAD=next_power_of_2(table.topk**2), num_warps=1 if table.topk <= 8 else 4,
    )  # fmt: skip


@Kernel
@triton.jit
def _rank_kernel(
    scores, chosen,
    WIDTH: tl.constexpr, CANDIDATES: tl.constexpr, NODES: tl.constexpr, NODES_PAD: tl.constexpr,
    BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Write each candidate of one block to the node of its rank; the best candidate is node 1. A
    single program would do all comparisons serially."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * WIDTH
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mine = ordered(tl.load(scores + i, mask=i < CANDIDATES, other=0.0))
    beaten = tl.zeros([BLOCK], tl.int32)
    for first in range(0, CANDIDATES, OTHERS):
        j = first + tl.arange(0, OTHERS)
        other = tl.load(scores + j, mask=j < CANDIDATES, other=0.0)
        other = tl.where(j < CANDIDATES, ordered(other), NONE)
        equal = other[None, :] == mine[:, None]
        better = (other[None, :] > mine[:, None]) | (equal & (j[None, :] < i[:, None]))
        beaten += tl.sum(better.to(tl.int32), 1)
    # No two candidates have the same rank, whatever their scores: each node gets exactly one.
    told = (i < CANDIDATES) & (beaten < NODES)
    tl.store(chosen + row * NODES_PAD + beaten + 1, i, mask=told)


@Kernel
@triton.jit
def _finish_kernel(
    best, tokens, parents, idx_mapping, tree_parents, tree_depths, tree_masks, draft_tokens,
    extra_nodes, of_memory,
    tree_stride, draft_stride,
    WIDTH: tl.constexpr, DRAFTED: tl.constexpr, NODES: tl.constexpr, NODES_PAD: tl.constexpr,
    ROUNDS: tl.constexpr, HAS_EXTRA: tl.constexpr, PATHS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tokens += row * WIDTH
    parents += row * WIDTH
    slot = tl.load(idx_mapping + row)
    node = tl.arange(0, NODES_PAD)
    is_draft = (node > 0) & (node <= NODES)
    chosen = tl.load(best + row * NODES_PAD + node, mask=is_draft, other=0)

    # The node of each parent, 0 (the root) where the parent candidate is -1.
    candidate = tl.load(parents + chosen, mask=is_draft, other=-1)
    same = (candidate[:, None] == chosen[None, :]) & is_draft[None, :]
    parent = tl.sum(tl.where(same, node[None, :], 0), 1)
    # Each round doubles the distance of the known ancestors. The root is its own ancestor.
    one = tl.full([NODES_PAD], 1, tl.int64)
    mask = one | (one << node.to(tl.int64))
    depth = is_draft.to(tl.int32)
    ancestor = parent
    for _ in tl.static_range(ROUNDS):
        mask |= tl.gather(mask, ancestor, 0)
        depth += tl.gather(depth, ancestor, 0)
        ancestor = tl.gather(ancestor, ancestor, 0)
    parent = tl.where(node == 0, -1, parent)
    token = tl.load(tokens + chosen, mask=is_draft, other=0)
    tl.store(draft_tokens + row * draft_stride + node - 1, token, mask=is_draft)
    stored = (node <= NODES) & (slot >= 0)
    tl.store(tree_parents + slot * tree_stride + node, parent, mask=stored)
    tl.store(tree_depths + slot * tree_stride + node, depth, mask=stored)
    tl.store(tree_masks + slot * tree_stride + node, mask, mask=stored)
    if HAS_EXTRA:
        # Columns behind the levels are those of other sources than the draft.
        is_extra = is_draft & (chosen >= DRAFTED)
        bits = tl.sum(tl.where(is_extra, one << node.to(tl.int64), 0), 0)
        tl.store(extra_nodes + slot, bits, mask=slot >= 0)
        if PATHS > 0:
            # Column by column a path's nodes are `PATHS` apart.
            told = tl.load(of_memory + row) >> ((chosen - DRAFTED) % PATHS)
            bits = tl.sum(tl.where(is_extra & (told & 1 != 0), one << node.to(tl.int64), 0), 0)
            tl.store(extra_nodes + SLOTS + slot, bits, mask=slot >= 0)


def finish_tree(
    table: CandidateTable, num_reqs: int, steps_done: int, num_nodes: int,
    idx_mapping: torch.Tensor, tree: TreeState, draft_tokens: torch.Tensor,
    *, num_extra: int = 0, extra_nodes: torch.Tensor | None = None,
    of_memory: tuple[torch.Tensor, int] | None = None,
) -> None:  # fmt: skip
    """Keep the best ``num_nodes`` candidates as the tree (EAGLE-2, arXiv:2406.16858, section 4.2).

    Nodes are ordered by score, highest first, ties by lower candidate index. Raises `ValueError` if
    ``steps_done``, ``num_nodes`` or ``num_extra`` is out of range.

    Args:
        table: has ``steps_done`` levels, and behind them ``num_extra`` columns of other sources,
            whose score is -inf where there is no candidate.
        idx_mapping: i64 ``[num_reqs]``, request-state index; a negative one (padding of a graph)
            leaves ``tree`` untouched.
        tree: receives the topology at the request-state indices.
        draft_tokens: i64 ``[>= num_reqs, >= num_nodes]`` by batch row, receives the tokens.
        extra_nodes: i64 ``[max_reqs]``, needed with `num_extra`; receives at the request-state
            indices a mask of the nodes that are other sources'.
        of_memory: i32 ``[>= num_reqs]`` by batch row, a mask of the paths that are from a memory,
            and how many paths take turns in the columns of other sources. Then `extra_nodes` is
            ``[2, max_reqs]``, and its second row receives which nodes are of these.
    """
    topk = table.topk
    candidates = num_candidates(topk, steps_done)
    if not 1 <= steps_done <= table.steps:
        raise ValueError(f"steps_done must be 1 to {table.steps}, got {steps_done}")
    most = min(MAX_NODES, candidates, tree.width - 1)
    if not 1 <= num_nodes <= most:
        raise ValueError(
            f"num_nodes must be 1 to {most} ({MAX_NODES}, {candidates} candidates, tree of "
            f"{tree.width - 1} nodes), got {num_nodes}"
        )
    if not 0 <= num_extra <= table.scores.shape[1] - candidates:
        raise ValueError(
            f"num_extra must be 0 to {table.scores.shape[1] - candidates}, the table's columns "
            f"behind {steps_done} levels, got {num_extra}"
        )
    if num_reqs == 0:
        return
    nodes_pad = next_power_of_2(num_nodes + 1)
    best = torch.empty(num_reqs, nodes_pad, dtype=torch.int32, device=table.scores.device)
    block, others = rank_block(candidates + num_extra)
    _rank_kernel[(num_reqs, cdiv(candidates + num_extra, block))](
        table.scores, best,
        WIDTH=table.scores.shape[1], CANDIDATES=candidates + num_extra, NODES=num_nodes,
        NODES_PAD=nodes_pad, BLOCK=block, OTHERS=others,
    )  # fmt: skip
    _finish_kernel[(num_reqs,)](
        best, table.tokens, table.parents, idx_mapping, tree.parents, tree.depths, tree.masks,
        draft_tokens, extra_nodes, None if of_memory is None else of_memory[0], tree.width,
        draft_tokens.stride(0),
        WIDTH=table.scores.shape[1], DRAFTED=candidates, NODES=num_nodes, NODES_PAD=nodes_pad,
        # A path of other candidates may be deeper than the levels.
        ROUNDS=max(steps_done, min(num_nodes, steps_done + num_extra)).bit_length(),
        HAS_EXTRA=num_extra > 0, PATHS=0 if of_memory is None else of_memory[1],
        SLOTS=0 if of_memory is None or extra_nodes is None else extra_nodes.shape[1],
    )  # fmt: skip

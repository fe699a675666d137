"""Choosing the nodes of the tree among the candidates, and its topology."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.candidates import CandidateTable
from vllm_graft.spec_decode.kernels.sizes import finish_block, next_power_of_2
from vllm_graft.spec_decode.policy import num_candidates
from vllm_graft.spec_decode.tree import TreeState


@triton.jit
def _best_nodes(scores, node, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr):
    """The candidate at each node: node ``n`` is the candidate that ``n - 1`` others beat."""
    chosen = tl.zeros_like(node)
    for i0 in range(0, CANDIDATES, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        mine = tl.load(scores + i, mask=i < CANDIDATES, other=float("-inf"))
        beaten = tl.zeros([BLOCK, BLOCK], tl.int32)
        for j0 in range(0, CANDIDATES, BLOCK):
            j = j0 + tl.arange(0, BLOCK)
            # Padding is -inf at a higher index, so it beats no candidate.
            other = tl.load(scores + j, mask=j < CANDIDATES, other=float("-inf"))
            equal = other[None, :] == mine[:, None]
            first = j[None, :] < i[:, None]
            beaten += ((other[None, :] > mine[:, None]) | (equal & first)).to(tl.int32)
        rank = tl.sum(beaten, 1)
        here = (node[:, None] == rank[None, :] + 1) & (i < CANDIDATES)[None, :]
        chosen += tl.sum(tl.where(here, i[None, :], 0), 1)
    return chosen


@triton.jit
def _chain_nodes(
    scores,
    parents,
    node,
    STEPS: tl.constexpr,
    LAST_FIRST: tl.constexpr,
    LAST_COUNT: tl.constexpr,
    LAST_PAD: tl.constexpr,
):
    """Ancestors of the last level's best candidate, then that candidate at every later node."""
    i = tl.arange(0, LAST_PAD)
    inside = i < LAST_COUNT
    score = tl.load(scores + LAST_FIRST + i, mask=inside, other=float("-inf"))
    top = tl.max(score, 0)
    candidate = LAST_FIRST + tl.min(tl.where(inside & (score == top), i, LAST_PAD), 0)
    depth = tl.minimum(node, STEPS)
    chosen = tl.zeros_like(node)
    for back in range(STEPS):
        chosen = tl.where(depth == STEPS - back, candidate, chosen)
        # The first level's parent is -1, which is not an index; it is not used either.
        candidate = tl.maximum(tl.load(parents + candidate), 0)
    return chosen


@triton.jit
def _finish_kernel(
    scores,
    tokens,
    parents,
    idx_mapping,
    is_chain,
    tree_parents,
    tree_depths,
    tree_masks,
    draft_tokens,
    tree_stride,
    draft_stride,
    WIDTH: tl.constexpr,
    CANDIDATES: tl.constexpr,
    STEPS: tl.constexpr,
    LAST_FIRST: tl.constexpr,
    LAST_COUNT: tl.constexpr,
    LAST_PAD: tl.constexpr,
    NODES: tl.constexpr,
    NODES_PAD: tl.constexpr,
    HAS_CHAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores += row * WIDTH
    tokens += row * WIDTH
    parents += row * WIDTH
    node = tl.arange(0, NODES_PAD)
    is_draft = (node > 0) & (node <= NODES)
    chosen = _best_nodes(scores, node, CANDIDATES, BLOCK)

    # The node of each parent, 0 (the root) where the parent candidate is -1.
    candidate = tl.load(parents + chosen, mask=is_draft, other=-1)
    same = (candidate[:, None] == chosen[None, :]) & is_draft[None, :]
    parent = tl.sum(tl.where(same, node[None, :], 0), 1)
    parent = tl.where(node == 0, -1, parent)
    depth = tl.zeros_like(node)
    one = tl.full([NODES_PAD], 1, tl.int64)
    mask = one << node.to(tl.int64)
    ancestor = parent
    for _ in range(STEPS):
        mask |= tl.where(ancestor >= 0, one << tl.maximum(ancestor, 0).to(tl.int64), 0)
        depth += (ancestor >= 0).to(tl.int32)
        at = ancestor[:, None] == node[None, :]
        ancestor = tl.sum(tl.where(at, parent[None, :] + 1, 0), 1) - 1

    if HAS_CHAIN:
        chain = tl.load(is_chain + row) != 0
        chain_nodes = _chain_nodes(scores, parents, node, STEPS, LAST_FIRST, LAST_COUNT, LAST_PAD)
        chosen = tl.where(chain, chain_nodes, chosen)
        parent = tl.where(chain, node - 1, parent)
        depth = tl.where(chain, node, depth)
        mask = tl.where(chain, ((one + one) << node.to(tl.int64)) - 1, mask)

    token = tl.load(tokens + chosen, mask=is_draft, other=0)
    tl.store(draft_tokens + row * draft_stride + node - 1, token, mask=is_draft)
    slot = tl.load(idx_mapping + row)
    stored = (node <= NODES) & (slot >= 0)
    tl.store(tree_parents + slot * tree_stride + node, parent, mask=stored)
    tl.store(tree_depths + slot * tree_stride + node, depth, mask=stored)
    tl.store(tree_masks + slot * tree_stride + node, mask, mask=stored)


def finish_tree(
    table: CandidateTable,
    num_reqs: int,
    steps_done: int,
    num_nodes: int,
    idx_mapping: torch.Tensor,
    is_chain: torch.Tensor | None,
    tree: TreeState,
    draft_tokens: torch.Tensor,
) -> None:
    """Keep the best ``num_nodes`` candidates as the tree (EAGLE-2, arXiv:2406.16858, section 4.2).

    Nodes are ordered by score, highest first, ties by lower candidate index. The ranking compares
    all pairs of candidates: quick up to about 4000 of them.

    Args:
        table: Candidates of ``steps_done`` levels.
        num_reqs: Batch rows.
        steps_done: Levels in the table.
        num_nodes: Draft nodes, at most 63 and at most the number of candidates.
        idx_mapping: i64 ``[num_reqs]``, request-state index; a negative one (padding of a graph)
            leaves ``tree`` untouched.
        is_chain: i32 or bool ``[num_reqs]``. Where set, the tree is a chain: the best candidate
            of the last level with its ancestors, cut to ``num_nodes`` or followed by repeats of
            its token. None means nowhere.
        tree: Receives the topology at the request-state indices.
        draft_tokens: i64 ``[>= num_reqs, >= num_nodes]`` by batch row, receives the tokens.
    """
    topk = table.topk
    candidates = num_candidates(topk, steps_done)
    if not 1 <= steps_done <= table.steps:
        raise ValueError(f"steps_done must be 1 to {table.steps}, got {steps_done}")
    if not 1 <= num_nodes <= min(63, candidates, tree.width - 1):
        raise ValueError(
            f"num_nodes must be 1 to {min(63, candidates, tree.width - 1)} (63, {candidates} "
            f"candidates, tree of {tree.width - 1} nodes), got {num_nodes}"
        )
    if num_reqs == 0:
        return
    last_count = topk if steps_done == 1 else topk * topk
    block, warps = finish_block(candidates)
    _finish_kernel[(num_reqs,)](
        table.scores,
        table.tokens,
        table.parents,
        idx_mapping,
        is_chain,
        tree.parents,
        tree.depths,
        tree.masks,
        draft_tokens,
        tree.width,
        draft_tokens.stride(0),
        WIDTH=table.scores.shape[1],
        CANDIDATES=candidates,
        STEPS=steps_done,
        LAST_FIRST=candidates - last_count,
        LAST_COUNT=last_count,
        LAST_PAD=next_power_of_2(last_count),
        NODES=num_nodes,
        NODES_PAD=next_power_of_2(num_nodes + 1),
        HAS_CHAIN=is_chain is not None,
        BLOCK=block,
        num_warps=warps,
    )

"""Slow, plain versions of the kernels: the oracle of their tests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_graft.spec_decode.kernels.compact import TokenRows
from vllm_graft.spec_decode.kernels.verify import TreeRows
from vllm_graft.spec_decode.targets.dense.plain_attention import (
    tree_attention_reference,
    write_scratch_reference,
)
from vllm_graft.spec_decode.trees.tree import CandidateTable, TreeState, num_candidates

__all__ = [
    "Node",
    "compact_kv_reference",
    "eagle2_tree",
    "expand_frontier_reference",
    "finish_tree_reference",
    "follow_path_reference",
    "prepare_rows_reference",
    "seed_frontier_reference",
    "tree_attention_reference",
    "walk_tree_reference",
    "write_scratch_reference",
]


@dataclass(frozen=True)
class Node:
    """A draft node as EAGLE-2 selects it."""

    candidate: int
    parent: int
    depth: int
    score: float


def eagle2_tree(level_logps: list[torch.Tensor], num_nodes: int) -> list[Node]:
    """EAGLE-2's expansion and reranking (arXiv:2406.16858, sections 4.1 and 4.2).

    Args:
        level_logps: f32 ``[topk]`` for the root's children, then for each further level
            ``[topk, topk]``: log-probabilities of the children of each frontier node.
        num_nodes: Nodes to keep.
    """
    topk = level_logps[0].shape[0]
    candidates: list[tuple[torch.Tensor, int, int]] = []  # score, parent candidate, depth
    frontier: list[tuple[torch.Tensor, int]] = [(torch.tensor(0.0), -1)]
    for depth, logps in enumerate(level_logps, start=1):
        rows = logps.reshape(-1, topk)
        new = [
            (score + rows[f, c], parent, depth)
            for f, (score, parent) in enumerate(frontier)
            for c in range(topk)
        ]
        order = sorted(range(len(new)), key=lambda i: (-new[i][0].item(), i))[:topk]
        order = list(range(topk)) if depth == 1 else order
        frontier = [(new[i][0], len(candidates) + i) for i in order]
        candidates += new
    best = sorted(range(len(candidates)), key=lambda i: (-candidates[i][0].item(), i))[:num_nodes]
    number = {-1: 0} | {candidate: node for node, candidate in enumerate(best, start=1)}
    return [
        Node(i, number[candidates[i][1]], candidates[i][2], candidates[i][0].item()) for i in best
    ]


def seed_frontier_reference(
    table: CandidateTable,
    logp: torch.Tensor,
    tokens: torch.Tensor,
    num_reqs: int,
    next_tokens: torch.Tensor | None = None,
) -> None:
    """The plain counterpart of :func:`vllm_graft.spec_decode.kernels.candidates.seed_frontier`."""
    for r in range(num_reqs):
        for c in range(table.topk):
            table.scores[r, c] = table.frontier_scores[r, c] = logp[r, c]
            table.tokens[r, c] = tokens[r, c]
            table.parents[r, c] = -1
            table.frontier_candidates[r, c] = c
            table.ancestors[r, c, 0] = c
            if next_tokens is not None:
                next_tokens[r * table.topk + c] = tokens[r, c]


def expand_frontier_reference(
    table: CandidateTable,
    level: int,
    child_logp: torch.Tensor,
    child_tokens: torch.Tensor,
    num_reqs: int,
    next_tokens: torch.Tensor,
    parent_rows: torch.Tensor,
) -> None:
    """The plain counterpart of ``expand_frontier`` of the kernels."""
    topk = table.topk
    first = num_candidates(topk, level)
    for r in range(num_reqs):
        children = []
        for f in range(topk):
            for c in range(topk):
                row, candidate = r * topk + f, first + f * topk + c
                table.scores[r, candidate] = table.frontier_scores[r, f] + child_logp[row, c]
                table.tokens[r, candidate] = child_tokens[row, c]
                table.parents[r, candidate] = table.frontier_candidates[r, f]
                children.append((-table.scores[r, candidate].item(), candidate, row))
        old = table.ancestors[r].clone()
        for j, (score, candidate, row) in enumerate(sorted(children)[:topk]):
            table.frontier_scores[r, j] = -score
            table.frontier_candidates[r, j] = candidate
            table.ancestors[r, j, :level] = old[row - r * topk, :level]
            table.ancestors[r, j, level] = level * topk + j
            next_tokens[r * topk + j] = table.tokens[r, candidate]
            parent_rows[r * topk + j] = row


def finish_tree_reference(
    table: CandidateTable,
    num_reqs: int,
    steps_done: int,
    num_nodes: int,
    idx_mapping: torch.Tensor,
    tree: TreeState,
    draft_tokens: torch.Tensor,
    *,
    num_extra: int = 0,
    extra_nodes: torch.Tensor | None = None,
    of_memory: None = None,
) -> None:
    """The plain counterpart of :func:`vllm_graft.spec_decode.kernels.candidates.finish_tree`."""
    levels = num_candidates(table.topk, steps_done)
    count = levels + num_extra
    for r in range(num_reqs):
        scores, parent_of = table.scores[r].tolist(), table.parents[r].tolist()
        best = sorted(range(count), key=lambda i: (-scores[i], i))[:num_nodes]
        number = {-1: 0} | {candidate: node for node, candidate in enumerate(best, start=1)}
        parents = [-1] + [number[parent_of[i]] for i in best]
        slot = int(idx_mapping[r])
        extra = sum(1 << node for node, i in enumerate(best, start=1) if i >= levels)
        if extra_nodes is not None and slot >= 0:
            extra_nodes[slot] = _signed(extra)
        draft_tokens[r, :num_nodes] = table.tokens[
            r, torch.tensor(best, device=table.tokens.device)
        ]
        _write_topology(tree, slot, parents)


def _write_topology(tree: TreeState, slot: int, parents: list[int]) -> None:
    if slot < 0:
        return
    for node, parent in enumerate(parents):
        tree.parents[slot, node] = parent
        tree.depths[slot, node] = 0 if parent < 0 else tree.depths[slot, parent] + 1
        ancestors = 0 if parent < 0 else int(tree.masks[slot, parent])
        tree.masks[slot, node] = _signed(ancestors | 1 << node)


def _signed(bits: int) -> int:
    bits &= (1 << 64) - 1
    return bits - (1 << 64) if bits >> 63 else bits


def prepare_rows_reference(
    tree: TreeState,
    batch: Any,
    num_computed: torch.Tensor,
    rows: TreeRows,
    *,
    plain_rows: bool = False,
    max_rows: int = 64,
) -> None:
    """The plain counterpart of :func:`vllm_graft.spec_decode.kernels.verify.prepare_rows`."""
    num_drafts, row_masks, num_rows = rows.num_drafts, rows.row_masks, rows.num_rows
    prefix_lens, plain_lens = rows.prefix_lens, rows.plain_lens
    idx_mapping, query_start_loc = batch.idx_mapping, batch.query_start_loc
    cu_num_logits, positions = batch.cu_num_logits, batch.positions
    num_reqs, num_reqs_padded = batch.num_reqs, batch.num_reqs_after_padding
    num_rows[num_reqs:num_reqs_padded] = 0
    prefix_lens[:num_reqs_padded] = 0
    plain_lens[:num_reqs_padded] = 0
    for r in range(num_reqs):
        start, end = int(query_start_loc[r]), int(query_start_loc[r + 1])
        drafts = int(cu_num_logits[r + 1] - cu_num_logits[r]) - 1
        num_drafts[r] = drafts
        if not 0 < drafts == end - start - 1:
            plain_lens[r] = num_computed[int(idx_mapping[r])] + end - start
        if drafts > 0:
            slot, first = int(idx_mapping[r]), end - drafts - 1
            num_rows[r] = drafts + 1
            prefix_lens[r] = num_computed[slot] + first - start
            for i in range(drafts + 1):
                base = int(num_computed[slot]) + first - start
                positions[first + i] = base + int(tree.depths[slot, i])
                row_masks[first + i] = _signed(int(tree.masks[slot, i]) & ((2 << drafts) - 1))
                rows.row_depths[first + i] = int(tree.depths[slot, i])
                rows.row_parents[first + i] = int(tree.parents[slot, i]) + first - start
        else:
            fits = end - start <= max_rows
            num_rows[r] = end - start if plain_rows and fits else 0
            if num_rows[r]:
                prefix_lens[r] = num_computed[int(idx_mapping[r])]
            for i in range(end - start if fits else 0):
                row_masks[start + i] = _signed((2 << i) - 1)
                rows.row_depths[start + i] = i
                rows.row_parents[start + i] = i - 1


def walk_tree_reference(
    target_tokens: torch.Tensor,
    draft_tokens_at_rows: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    tree: TreeState,
    sampled: torch.Tensor,
    path: torch.Tensor,
    num_sampled: torch.Tensor,
    positions: torch.Tensor | None = None,
    prefill_len: torch.Tensor | None = None,
    emitted: torch.Tensor | None = None,
    extra_nodes: torch.Tensor | None = None,
    extra_counts: torch.Tensor | None = None,
) -> None:
    """The plain counterpart of :func:`vllm_graft.spec_decode.kernels.verify.walk_tree`."""
    for r in range(cu_num_logits.shape[0] - 1):
        first, rows = int(cu_num_logits[r]), int(cu_num_logits[r + 1] - cu_num_logits[r])
        parents = tree.parents[int(idx_mapping[r])].tolist()
        follow = True
        if positions is not None and prefill_len is not None and rows:
            follow = int(positions[first]) >= int(prefill_len[int(idx_mapping[r])])
        node: int | None = 0 if rows else None
        count = 0
        while node is not None:
            token = int(target_tokens[first + node])
            sampled[r, count], path[r, count] = token, node
            if emitted is not None and token >= 0:
                emitted[token] += 1
            count += 1
            children = [
                child
                for child in range(1, rows)
                if follow
                and parents[child] == node
                and token >= 0
                and int(draft_tokens_at_rows[first + child]) == token
            ]
            node = children[0] if children else None
        num_sampled[r] = count
        sampled[r, count:] = 0
        if extra_nodes is not None and extra_counts is not None and rows and follow:
            bits = int(extra_nodes[int(idx_mapping[r])])
            ours = [i for i in range(1, rows) if bits >> i & 1]
            verified = [i for i in ours if int(draft_tokens_at_rows[first + i]) >= 0]
            extra_counts[0] += len(verified)
            extra_counts[1] += len(set(path[r, :count].tolist()) & set(verified))


def compact_kv_reference(
    kv_caches: list[torch.Tensor],
    groups: list[int],
    path: torch.Tensor,
    num_sampled: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    slot_mappings: torch.Tensor,
    num_reqs: int,
) -> None:
    """The plain counterpart of :func:`vllm_graft.spec_decode.kernels.compact.compact_kv`."""
    for cache, group in zip(kv_caches, groups, strict=True):
        block_size = cache.shape[2]
        for r in range(num_reqs):
            drafts = int(num_draft_tokens[r])
            first = int(query_start_loc[r + 1]) - drafts - 1
            for d in range(1, int(num_sampled[r]) if drafts else 0):
                source = int(slot_mappings[group, first + int(path[r, d])])
                target = int(slot_mappings[group, first + d])
                if source >= 0 and target >= 0:
                    row = cache[source // block_size, :, source % block_size].clone()
                    cache[target // block_size, :, target % block_size] = row


def follow_path_reference(
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
    """The plain counterpart of :func:`vllm_graft.spec_decode.kernels.compact.follow_path`."""
    source = list(range(num_tokens))
    for r in range(num_reqs):
        drafts = int(num_draft_tokens[r])
        first = int(query_start_loc[r + 1]) - drafts - 1
        for d in range(int(num_sampled[r]) if drafts else 0):
            source[first + d] = first + int(path[r, d])
    for before, after in zip(rows, moved, strict=True):
        for t in range(num_tokens):
            after[t] = before[source[t]]


def finish_and_compare(
    finish: Callable[..., None], table: Any, num_reqs: int, *args: Any, **extra: Any
) -> None:
    """Finish trees by `finish`, called as `finish_tree`, and by the reference."""
    *sizes, slots, tree, drafts = args
    finish(table, num_reqs, *args, **extra)
    nodes = extra.get("extra_nodes")
    other = type(tree)(*(each.clone() for each in vars(tree).values()))
    again, marked = drafts.clone(), None if nodes is None else nodes.clone()
    reference: Callable[..., None] = finish_tree_reference
    reference(table, num_reqs, *sizes, slots, other, again, **{**extra, "extra_nodes": marked})
    ours, theirs = [*vars(tree).values(), drafts], [*vars(other).values(), again]
    if nodes is not None:
        ours, theirs = [*ours, nodes], [*theirs, marked]
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.equal(mine, expected)

"""Verification: follows the target's tokens down the tree."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import next_power_of_2
from vllm_graft.spec_decode.trees.topology import TreeState


@Kernel
@triton.jit
def _walk_kernel(
    target_tokens,
    draft_tokens,
    cu_num_logits,
    idx_mapping,
    tree_parents,
    positions,
    prefill_len,
    seq_lens,
    sampled,
    path,
    num_sampled,
    num_rejected,
    emitted,
    extra_nodes,
    extra_counts,
    teaches,
    tree_stride,
    sampled_width,
    sampled_stride,
    path_stride,
    HAS_PREFILL: tl.constexpr,
    COUNTED: tl.constexpr,
    EXTRAS: tl.constexpr,
    SLOTS: tl.constexpr,
    SOME_TEACH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_num_logits + req).to(tl.int64)
    rows = (tl.load(cu_num_logits + req + 1) - first).to(tl.int32)
    slot = tl.load(idx_mapping + req)
    node = tl.arange(0, WIDTH_PAD)
    target = tl.load(target_tokens + first + node, mask=node < rows, other=-1)
    is_draft = (node > 0) & (node < rows)
    draft = tl.load(draft_tokens + first + node, mask=is_draft, other=-1)
    parent = tl.load(tree_parents + slot * tree_stride + node, mask=is_draft, other=-1)
    follow = is_draft & (draft >= 0)
    if HAS_PREFILL:
        follow = follow & (tl.load(positions + first) >= tl.load(prefill_len + slot))

    taken = tl.full([WIDTH_PAD], 0, tl.int32)
    counts = slot == slot
    if SOME_TEACH:
        counts = tl.load(teaches + slot) != 0
    count = 0
    current = 0
    # Without a matching child `current` becomes WIDTH_PAD, which is at least `rows`.
    while current < rows:
        token = tl.sum(tl.where(node == current, target, 0), 0)
        tl.store(sampled + req * sampled_stride + count, token)
        tl.store(path + req * path_stride + count, current)
        if COUNTED:
            tl.atomic_add(emitted + token, 1, mask=counts & (token >= 0))
        taken = tl.where(node == current, 1, taken)
        count += 1
        child = follow & (parent == current) & (draft == token)
        current = tl.min(tl.where(child, node, WIDTH_PAD), 0)
    if num_rejected is not None:
        unfinished = tl.load(seq_lens + req) < tl.load(prefill_len + slot)
        tl.store(num_rejected + req, tl.where(unfinished, 0, rows - count))
        count_told = tl.where(unfinished, 0, count)
        tl.store(num_sampled + req, count_told)
    else:
        tl.store(num_sampled + req, count)
    for kind in tl.static_range(EXTRAS):
        bits = tl.load(extra_nodes + kind * SLOTS + slot)
        is_extra = follow & (((bits >> node.to(tl.int64)) & 1) != 0)
        tl.atomic_add(extra_counts + 2 * kind, tl.sum(is_extra.to(tl.int64), 0))
        accepted = tl.sum((is_extra & (taken != 0)).to(tl.int64), 0)
        tl.atomic_add(extra_counts + 2 * kind + 1, accepted)
    rest = (node >= count) & (node < sampled_width)
    tl.store(sampled + req * sampled_stride + node, tl.zeros_like(target), mask=rest)


def walk_tree(
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
    teaches: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    num_rejected: torch.Tensor | None = None,
) -> None:
    """Accept the path from the root on which each next node is the token that the target drew.

    An emitted token is always the target's own draw at a node, given the tokens before it. Drafts,
    also those ranked by the noise of the draws, decide only how far the walk goes. The last emitted
    token is the bonus token.

    Args:
        target_tokens: i64 ``[num_logits]``, the target's draws.
        draft_tokens_at_rows: i64 ``[num_logits]``; the root's is not read, -1 is never accepted.
        cu_num_logits: i32 ``[num_reqs + 1]``; row ``j`` of a request is node ``j`` of its tree.
        idx_mapping: i64 ``[num_reqs]``, request-state index; all of ``[max_reqs]`` are by it.
        tree: only the nodes that have a logits row take part.
        sampled: i64 ``[num_reqs, width]``; receives the emitted tokens, then zeros.
        path: i32 ``[>= num_reqs, width]``; receives the node that emitted each token.
        num_sampled: i32 ``[num_reqs]``; receives the number of emitted tokens.
        positions: i64 ``[num_logits]``, positions in the request; None if no draft is a
            placeholder.
        prefill_len: i32 ``[max_reqs]``, tokens of the prompt, needed with `positions`. The walk
            ends at a root within its prompt.
        emitted: i32 ``[vocab]``; is increased by 1 at each emitted token.
        extra_nodes: i64 ``[max_reqs]`` or ``[kinds, max_reqs]``, from ``finish_tree``.
        extra_counts: i64 ``[2 * kinds]``, needed with `extra_nodes`; is increased by how many of
            each kind took part and how many were accepted.
        teaches: i32 ``[max_reqs]``, 0 for requests whose tokens `emitted` does not count.
        seq_lens: i32 ``[num_reqs]``, tokens of each request behind the step, needed with
            `num_rejected`.
        num_rejected: i32 ``[num_reqs]``; receives the rows that are not accepted. A request whose
            prompt is not whole then has none, and none that is accepted.
    """
    num_reqs = cu_num_logits.shape[0] - 1
    if num_reqs <= 0:
        return
    _walk_kernel[(num_reqs,)](
        target_tokens,
        draft_tokens_at_rows,
        cu_num_logits,
        idx_mapping,
        tree.parents,
        positions,
        prefill_len,
        seq_lens,
        sampled,
        path,
        num_sampled,
        num_rejected,
        emitted,
        extra_nodes,
        extra_counts,
        teaches,
        tree.width,
        sampled.shape[1],
        sampled.stride(0),
        path.stride(0),
        HAS_PREFILL=positions is not None,
        COUNTED=emitted is not None,
        EXTRAS=0 if extra_nodes is None else extra_nodes.numel() // extra_nodes.shape[-1],
        SLOTS=0 if extra_nodes is None else extra_nodes.shape[-1],
        SOME_TEACH=emitted is not None and teaches is not None,
        WIDTH_PAD=next_power_of_2(tree.width),
        num_warps=1,
    )

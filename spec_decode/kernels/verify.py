"""Verification: what the target's pass needs to know of each row, then the walk down the tree."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from typing import Any, Self

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, next_power_of_2
from vllm_graft.spec_decode.trees.tree import TreeState

MASK_BITS = 64


@dataclass(frozen=True)
class TreeRows:
    """Which rows of a batch belong to trees, and what each of them sees. Addresses are stable.

    The ``row_`` tensors are ``[max_tokens]``, the others ``[max_reqs]`` by batch row.

    Attributes:
        num_drafts: i32, as all others but the masks; 0 for a plain request.
        row_masks: i64; bit ``j`` is set if the row sees the request's ``j``-th tree row.
        row_depths: a row's position behind the first of its request that the tree kernel computes.
        row_parents: the row that comes before each row on its path, counted from its request's
            first row; -1 for that one. Plain queries too long for the kernel keep old ones.
        num_rows: how many of the query's last rows the tree kernel computes.
        prefix_lens: keys before these rows; 0 without such rows.
        plain_lens: keys that the platform's attention reads; none where all rows are a tree's.
    """

    num_drafts: torch.Tensor
    row_masks: torch.Tensor
    row_depths: torch.Tensor
    row_parents: torch.Tensor
    num_rows: torch.Tensor
    prefix_lens: torch.Tensor
    plain_lens: torch.Tensor

    @classmethod
    def allocate(cls, max_reqs: int, max_tokens: int, device: torch.device | str) -> Self:
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
    tree_parents, tree_depths, tree_masks, idx_mapping, query_start_loc, cu_num_logits,
    num_computed, num_drafts, positions, row_masks, row_depths, row_parents, num_rows, prefix_lens,
    plain_lens, num_reqs, max_rows, tree_stride,
    PLAIN_ROWS: tl.constexpr, ROWS_PAD: tl.constexpr,
):  # fmt: skip
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


def prepare_rows(
    tree: TreeState,
    batch: Any,
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
        batch: vLLM's ``InputBatch``, whose positions of tree rows are overwritten. A request has
            one more logits row than drafts. A graph's rows behind ``num_reqs`` get 0 rows.
        num_computed: i32 ``[max_reqs]`` by request-state index, tokens before the query.
        rows: receives what attention reads.
        plain_rows: whether the tree kernel also computes plain requests that fit, as it must where
            a FULL graph holds no other attention.
        max_rows: 1 to 64.
    """
    if batch.num_reqs_after_padding == 0:
        return
    _rows_kernel[(batch.num_reqs_after_padding,)](
        tree.parents, tree.depths, tree.masks, batch.idx_mapping, batch.query_start_loc,
        batch.cu_num_logits, num_computed, rows.num_drafts, batch.positions, rows.row_masks,
        rows.row_depths, rows.row_parents, rows.num_rows, rows.prefix_lens, rows.plain_lens,
        batch.num_reqs, max_rows, tree.width,
        PLAIN_ROWS=plain_rows, ROWS_PAD=next_power_of_2(max(tree.width, max_rows)), num_warps=1,
    )  # fmt: skip


@Kernel
@triton.jit
def _walk_kernel(
    target_tokens, draft_tokens, cu_num_logits, idx_mapping, tree_parents, positions, prefill_len,
    seq_lens, sampled, path, num_sampled, num_rejected, emitted, extra_nodes, extra_counts, teaches,
    tree_stride, sampled_width,
    sampled_stride, path_stride,
    HAS_PREFILL: tl.constexpr, COUNTED: tl.constexpr, EXTRAS: tl.constexpr, SLOTS: tl.constexpr,
    SOME_TEACH: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
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
    target_tokens: torch.Tensor, draft_tokens_at_rows: torch.Tensor, cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor, tree: TreeState, sampled: torch.Tensor, path: torch.Tensor,
    num_sampled: torch.Tensor, positions: torch.Tensor | None = None,
    prefill_len: torch.Tensor | None = None, emitted: torch.Tensor | None = None,
    extra_nodes: torch.Tensor | None = None, extra_counts: torch.Tensor | None = None,
    teaches: torch.Tensor | None = None, seq_lens: torch.Tensor | None = None,
    num_rejected: torch.Tensor | None = None,
) -> None:  # fmt: skip
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
        positions: i64 ``[num_logits]``, in the request; None if no draft is a placeholder.
        prefill_len: i32 ``[max_reqs]``, tokens of the prompt, needed with `positions`. The walk
            ends at a root within its prompt.
        emitted: i32 ``[vocab]``; is increased by 1 at each emitted token.
        extra_nodes: i64 ``[max_reqs]`` or ``[kinds, max_reqs]``, from ``finish_tree``.
        extra_counts: i64 ``[2 * kinds]``, needed with `extra_nodes`; is increased by how many of
            each kind took part and how many were accepted.
        teaches: i32 ``[max_reqs]``, 0 for requests whose tokens `emitted` does not count.
        seq_lens: i32 ``[num_reqs]``, tokens behind the step, needed with `num_rejected`.
        num_rejected: i32 ``[num_reqs]``; receives the rows that are not accepted. A request whose
            prompt is not whole then has none, and none that is accepted.
    """
    num_reqs = cu_num_logits.shape[0] - 1
    if num_reqs <= 0:
        return
    _walk_kernel[(num_reqs,)](
        target_tokens, draft_tokens_at_rows, cu_num_logits, idx_mapping, tree.parents, positions,
        prefill_len, seq_lens, sampled, path, num_sampled, num_rejected, emitted, extra_nodes,
        extra_counts, teaches, tree.width, sampled.shape[1],
        sampled.stride(0), path.stride(0),
        HAS_PREFILL=positions is not None, COUNTED=emitted is not None,
        EXTRAS=0 if extra_nodes is None else extra_nodes.numel() // extra_nodes.shape[-1],
        SLOTS=0 if extra_nodes is None else extra_nodes.shape[-1],
        SOME_TEACH=emitted is not None and teaches is not None,
        WIDTH_PAD=next_power_of_2(tree.width), num_warps=1,
    )  # fmt: skip

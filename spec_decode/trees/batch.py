"""What attention reads of a batch in one layer: trees to verify, or a level of trees to draft."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TreeBatch:
    """Queries, keys and masks of a batch, for either way of tree attention.

    The last ``num_rows[r]`` rows of request ``r``'s query are its tree. They see all of its keys
    before their own, which are the last of the sequence, and of their own those of their mask's
    bits. Tensors are held, not copied, and may be wider than the batch where ``>=`` says so;
    nothing here is read on the host but shapes and numbers, so a captured graph stays right while
    its tensors change.

    Attributes:
        query: ``[num_tokens, num_heads, head_size]``, bf16, fp16 or fp32. The two passes take no
            fp32, but e4m3 (float8_e4m3fn or uint8) beside an e4m3 cache.
        kv_cache: ``[num_blocks, kv_heads, block_size, 2 * head_size]``, K before V, last dimension
            contiguous; dtype of the output, or e4m3 (float8_e4m3fn or uint8).
        query_start_loc: i32 ``[>= num_reqs + 1]``.
        seq_lens: i32 ``[num_reqs]``, keys of a request, those of the query included.
        prefix_lens: i32 ``[num_reqs]``, ``seq_lens - num_rows``; 0 where ``num_rows`` is. Read by
            the two passes only.
        block_table: i32 ``[>= num_reqs, max_blocks]``.
        row_masks: i64 ``[>= num_tokens]``, bit ``j`` set if the row sees the request's ``j``-th
            row.
        num_rows: i32 ``[>= num_reqs]``, at most `max_rows` and the query's are computed.
        max_rows: bound of `num_rows`, at most 64; for the first of two passes of a query's rows.
        max_seq_len: bound of `seq_lens`.
        scale: of the logits.
        q_scale: f32, one element; multiplies an e4m3 query. None means 1.
        k_scale: as `q_scale`, for K of an e4m3 cache.
        v_scale: as `k_scale`, for V.
        soft_cap: ``cap * tanh(logits / cap)`` if positive.
        mixed: whether most requests have far fewer rows than `max_rows`, or none.
    """

    query: torch.Tensor
    kv_cache: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    block_table: torch.Tensor
    row_masks: torch.Tensor
    num_rows: torch.Tensor
    max_rows: int
    max_seq_len: int
    scale: float
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    soft_cap: float = 0.0
    mixed: bool = False

    @property
    def num_reqs(self) -> int:
        """Requests, padding included."""
        return len(self.seq_lens)


@dataclass(frozen=True)
class DraftBatch:
    """A frontier of the draft: its queries see the paged prefix and each node's ancestors.

    Attributes:
        query: ``[num_reqs * topk, num_heads, head_size]``.
        kv_cache: as in `TreeBatch`, of the draft's layer.
        scratch_kv: ``[max_reqs, steps * topk, kv_heads, 2 * head_size]``, dtype of ``query``; by
            batch row. The level's own K/V is in it already.
        ancestors: i32 ``[max_reqs, topk, steps]``, ``CandidateTable.ancestors``.
        level: of the frontier; 0 is the children of the root.
        prefix_lens: i32 ``[>= num_reqs]``, paged keys of each request, all visible.
        block_table: i32 ``[>= num_reqs, max_blocks]``.
        num_reqs: batch rows.
        topk: frontier nodes per batch row.
        scale: of the logits.
        k_scale: as in `TreeBatch`; never applied to the scratch.
        v_scale: as `k_scale`.
        soft_cap: as in `TreeBatch`.
        max_seq_len: bound of `prefix_lens`, for the number of splits; None: from `block_table`.
    """

    query: torch.Tensor
    kv_cache: torch.Tensor
    scratch_kv: torch.Tensor
    ancestors: torch.Tensor
    level: int
    prefix_lens: torch.Tensor
    block_table: torch.Tensor
    num_reqs: int
    topk: int
    scale: float
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    soft_cap: float = 0.0
    max_seq_len: int | None = None

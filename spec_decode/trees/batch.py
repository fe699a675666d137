"""What attention reads of a batch whose requests verify trees, in one layer."""

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

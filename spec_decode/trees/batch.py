"""Inputs of attention in one layer: trees to verify, or one level of trees to draft."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TreeBatch:
    """Queries, keys and masks of a batch whose trees are verified, for both attention kernels.

    The last ``num_rows[r]`` rows of request ``r``'s query are the rows of its tree, and the keys of
    these rows are the last ones of its sequence. A tree row sees every key before the tree, and
    the keys of those tree rows whose bits are set in its mask. Tensors are held, not copied, and
    may be wider than the batch where a shape says ``>=``. The host reads shapes and plain numbers
    only, so a captured graph stays right while its tensors change.

    Attributes:
        query: ``[num_tokens, num_heads, head_size]``, bf16, fp16 or fp32, or e4m3 (float8_e4m3fn or
            uint8) beside an e4m3 cache. The two passes take no fp32, and need an e4m3 query there.
        kv_cache: ``[num_blocks, kv_heads, block_size, 2 * head_size]``, K before V, last dimension
            contiguous; dtype of the output, or e4m3.
        query_start_loc: i32 ``[>= num_reqs + 1]``.
        seq_lens: i32 ``[num_reqs]``, keys of a request, including those of the query.
        prefix_lens: i32 ``[num_reqs]``, ``seq_lens - num_rows``, or 0 where ``num_rows`` is 0. Only
            the two passes read it.
        block_table: i32 ``[>= num_reqs, max_blocks]``.
        row_masks: i64 ``[>= num_tokens]``; bit ``j``: the row sees the request's ``j``-th tree row.
        num_rows: i32 ``[>= num_reqs]``, tree rows of a request. At most `max_rows` of them are
            computed, and never more rows than the query has.
        max_rows: upper bound of `num_rows`, at most 64. The first of the two passes needs an upper
            bound of the rows of every query.
        max_seq_len: upper bound of `seq_lens`.
        scale: factor of the logits.
        q_scale: f32, one element; multiplies an e4m3 query. None means 1.
        k_scale: likewise, for K of an e4m3 cache; `v_scale` for V.
        soft_cap: if positive, logits become ``cap * tanh(logits / cap)``.
        mixed: whether most requests have far fewer rows than `max_rows`, or none.
        window: if positive, a row sees only the last `window` positions, its own among them. Blocks
            whose keys no row sees are not read. The two passes take no window.
        chunked: whether `window` is the size of chunks in place of a window: a row sees only the
            positions from the last multiple of it on.
        row_depths: i32 ``[>= num_tokens]``, depth of each tree row. Only a window needs it.
        sinks: ``[num_heads]``, a logit per head that has no value and no key: it enters the sum of
            weights alone. Of the two passes, the second counts it.
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
    window: int = 0
    chunked: bool = False
    row_depths: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)


@dataclass(frozen=True)
class DraftBatch:
    """The frontier of a level in the draft: a query sees the paged prefix and its node's ancestors.

    Attributes that are not told here are those of `TreeBatch`.

    Attributes:
        query: ``[num_reqs * topk, num_heads, head_size]``.
        scratch_kv: ``[max_reqs, steps * topk, kv_heads, 2 * head_size]`` by batch row, dtype of
            the output. It holds the level's own K/V already, and scales are never applied to it.
        ancestors: i32 ``[max_reqs, topk, steps]``, ``CandidateTable.ancestors``.
        prefix_lens: i32 ``[>= num_reqs]``, paged keys of each request, all visible.
        max_seq_len: upper bound of `prefix_lens`, which decides the number of splits. None takes
            the bound from the width of `block_table`.
        window: larger than the number of levels, so that a row sees all of its ancestors.
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
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    soft_cap: float = 0.0
    max_seq_len: int | None = None
    window: int = 0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class LatentDraftBatch:
    """The frontier of a level in a draft with MLA: `DraftBatch` over latents, as in `LatentBatch`.

    Attributes:
        query: ``[num_reqs * topk, num_heads, rank]``.
        query_rope: ``[num_reqs * topk, num_heads, rope]``.
        scratch: ``[max_reqs, steps * topk, 1, rank + rope]`` by batch row, dtype of ``query``. It
            holds the level's own latents already, and `k_scale` is never applied to it.
        prefix_lens: i32 ``[>= num_reqs]``, paged latents of each request, all visible.
    """

    query: torch.Tensor
    query_rope: torch.Tensor
    latents: torch.Tensor
    scratch: torch.Tensor
    ancestors: torch.Tensor
    level: int
    prefix_lens: torch.Tensor
    block_table: torch.Tensor
    num_reqs: int
    topk: int
    max_seq_len: int
    scale: float
    k_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class LatentBatch:
    """Queries, latents and masks of a batch whose trees are verified on a layer with MLA.

    All heads share one key per token: its latent and, behind that, its rotated part. The latent is
    the value, too (the absorbed form of multi-head latent attention, arXiv:2405.04434). What
    `TreeBatch` says of tree rows, masks, and what the host reads holds here.

    Attributes:
        query: ``[num_tokens, num_heads, rank]``, the part that meets latents; bf16, fp16 or fp32.
        query_rope: ``[num_tokens, num_heads, rope]``, the rotated part, of the same dtype.
        latents: ``[num_blocks, block_size, rank + rope]``, last dimension contiguous; dtype of the
            query, or e4m3 (float8_e4m3fn or uint8).
        prefix_lens: i32 ``[num_reqs]``, keys before a request's tree.
        max_seq_len: upper bound of a request's keys, its tree's among them.
        k_scale: f32, one element; multiplies e4m3 latents and rotated parts. None means 1.
    """

    query: torch.Tensor
    query_rope: torch.Tensor
    latents: torch.Tensor
    query_start_loc: torch.Tensor
    prefix_lens: torch.Tensor
    block_table: torch.Tensor
    row_masks: torch.Tensor
    num_rows: torch.Tensor
    max_rows: int
    max_seq_len: int
    scale: float
    k_scale: torch.Tensor | None = None
    mixed: bool = False

    @property
    def num_reqs(self) -> int:
        return len(self.prefix_lens)

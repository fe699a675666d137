"""Tree attention in two passes: FlashAttention 3 over the prefix, then the tree's own rows.

Where a request's rows times the heads that share K/V fill a tile of 128, attention over a long
context is a matter of arithmetic, of which FlashAttention 3 (arXiv:2407.08608) does more a second
than our Triton kernel. It has no tree mask: it sees the keys before the tree, all visible, and
hands on its log-sum-exp, by which the second pass merges the few keys of the tree.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vllm_graft.spec_decode.kernels.own_rows import attend_own_rows

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

    from vllm_graft.spec_decode.ways import WayChoice

_TILE = 128
"""Query rows of a program of FlashAttention 3, heads that share K/V included."""

_SPLIT_BYTES = 128 << 20
"""What the partial results of all splits may take; in a graph they stay in its pool."""

_MAX_SPLITS = 64


class PrefixAttention(Protocol):
    """The first pass: attention over the keys before the tree, without a mask."""

    def __call__(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        *,
        query_start_loc: torch.Tensor,
        prefix_lens: torch.Tensor,
        block_table: torch.Tensor,
        max_rows: int,
        max_seq_len: int,
        scale: float,
        q_scale: torch.Tensor | None,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        soft_cap: float,
        multiprocessors: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and its log-sum-exp (natural logarithm).

        Args:
            query: ``[num_tokens, num_heads, head_size]``, bf16, fp16 or e4m3.
            kv_cache: ``[num_blocks, kv_heads, block_size, 2 * head_size]``, e4m3 if ``query`` is,
                otherwise of its dtype.
            query_start_loc: i32 ``[num_reqs + 1]``.
            prefix_lens: i32 ``[num_reqs]``; for 0 the results are arbitrary.
            block_table: i32 ``[num_reqs, max_blocks]``.
            max_rows: Bound of a request's rows.
            max_seq_len: Bound of ``prefix_lens``.
            scale: Of the logits.
            q_scale: f32, one element; multiplies an e4m3 query.
            k_scale: As ``q_scale``, for K.
            v_scale: As ``q_scale``, for V.
            soft_cap: ``cap * tanh(logits / cap)`` if positive.
            multiprocessors: Of the device.

        Returns:
            ``[num_tokens, num_heads, head_size]`` of any floating dtype, and f32
            ``[num_heads, num_tokens]``.
        """
        ...


def num_splits(
    num_tokens: int, num_heads: int, kv_heads: int, head_size: int, rows: int, multiprocessors: int
) -> int:
    """Bound of FlashAttention's splits of a request's keys. It decides on the device within it.

    As many as let one long request fill the device, and whose partial results fit a budget.
    Depends on host values only, so that buffers in a captured graph stay large enough.
    """
    programs = kv_heads * -(-rows * (num_heads // kv_heads) // _TILE)
    bytes_a_split = 4 * num_tokens * num_heads * (head_size + 1)
    fit = _SPLIT_BYTES // bytes_a_split
    return max(1, min(multiprocessors // programs, fit, _MAX_SPLITS))


def plan_prefix(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_rows: int,
    max_seq_len: int,
    soft_cap: float,
    multiprocessors: int,
) -> torch.Tensor:
    """FlashAttention's schedule of the first pass, the same for every layer of a forward pass.

    One small kernel, which each layer would launch otherwise. Reads no device value on the host.
    Arguments are those of `PrefixAttention`.

    Returns:
        int32, opaque.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    num_tokens, num_heads, head_size = query.shape
    kv_heads, block_size = kv_cache.shape[1:3]
    sizes = (num_tokens, num_heads, kv_heads, head_size, max_rows, multiprocessors)
    plan: torch.Tensor = get_scheduler_metadata(
        batch_size=len(prefix_lens),
        max_seqlen_q=max_rows,
        max_seqlen_k=max_seq_len,
        num_heads_q=num_heads,
        num_heads_kv=kv_heads,
        headdim=head_size,
        cache_seqlens=prefix_lens,
        qkv_dtype=query.dtype,
        cu_seqlens_q=query_start_loc,
        page_size=block_size,
        causal=False,
        has_softcap=soft_cap > 0,
        num_splits=num_splits(*sizes),
    )
    return plan


def flash_prefix_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    prefix_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_rows: int,
    max_seq_len: int,
    scale: float,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    soft_cap: float,
    multiprocessors: int,
    plan: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`PrefixAttention` by vLLM's FlashAttention 3, with what `plan_prefix` made of the same."""
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    num_tokens, num_heads, head_size = query.shape
    kv_heads = kv_cache.shape[1]
    # TMA wants the strides of a single KV head aligned, too.
    key, value = (
        canonicalize_singleton_dim_strides(part)
        for part in kv_cache.transpose(1, 2).split(head_size, dim=-1)
    )
    sizes = (num_tokens, num_heads, kv_heads, head_size, max_rows, multiprocessors)
    scales = (len(prefix_lens), kv_heads)
    out, lse = flash_attn_varlen_func(
        q=query,
        k=key,
        v=value,
        cu_seqlens_q=query_start_loc,
        max_seqlen_q=max_rows,
        seqused_k=prefix_lens,
        max_seqlen_k=max_seq_len,
        block_table=block_table,
        softmax_scale=scale,
        softcap=soft_cap,
        causal=False,
        return_softmax_lse=True,
        scheduler_metadata=plan,
        q_descale=None if q_scale is None else q_scale.expand(scales),
        k_descale=None if k_scale is None else k_scale.expand(scales),
        v_descale=None if v_scale is None else v_scale.expand(scales),
        num_splits=num_splits(*sizes),
        fa_version=3,
    )
    return out, lse


def two_pass_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    block_table: torch.Tensor,
    row_masks: torch.Tensor,
    num_rows: torch.Tensor,
    max_rows: int,
    max_seq_len: int,
    scale: float,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    multiprocessors: int,
    prefix_attention: PrefixAttention = flash_prefix_attention,
) -> None:
    """As :func:`vllm_graft.spec_decode.kernels.attention.tree_attention`, by two kernels.

    Args:
        query: ``[num_tokens, num_heads, head_size]``, bf16 or fp16; e4m3 beside an e4m3 cache.
        kv_cache: As there.
        out: As there.
        query_start_loc: i32 ``[num_reqs + 1]``, of queries of at most ``max_rows`` rows.
        seq_lens: As there.
        prefix_lens: i32 ``[num_reqs]``, ``seq_lens - num_rows``; 0 where ``num_rows`` is.
        block_table: i32 ``[num_reqs, max_blocks]``.
        row_masks: As there.
        num_rows: As there.
        max_rows: As there.
        max_seq_len: Bound of ``seq_lens``.
        scale: As there.
        q_scale: f32, one element; multiplies an e4m3 query.
        k_scale: As there.
        v_scale: As there.
        soft_cap: As there.
        multiprocessors: Of the device.
        prefix_attention: The first pass.
    """
    if seq_lens.shape[0] == 0:
        return
    shared: dict[str, Any] = {
        "query_start_loc": query_start_loc,
        "block_table": block_table,
        "max_rows": max_rows,
        "scale": scale,
        "q_scale": q_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "soft_cap": soft_cap,
    }
    prefix_out, prefix_lse = prefix_attention(
        query,
        kv_cache,
        prefix_lens=prefix_lens,
        max_seq_len=max_seq_len,
        multiprocessors=multiprocessors,
        **shared,
    )
    attend_own_rows(
        query,
        kv_cache,
        prefix_out,
        prefix_lse,
        out,
        seq_lens=seq_lens,
        row_masks=row_masks,
        num_rows=num_rows,
        **shared,
    )


@dataclass
class TwoPass:
    """Both passes for the layers of one geometry, where they are chosen.

    Attributes:
        choice: which batches take them.
    """

    choice: WayChoice
    _planned: Any = None
    _capturing: bool = False
    _plan: torch.Tensor | None = None

    def takes(self, metadata: Any, max_rows: int, *, alike: bool) -> bool:
        """Whether a batch, all of whose requests verify trees, goes this way; by host values only.

        Args:
            metadata: vLLM's of the FLASH_ATTN backend.
            max_rows: bound of a request's rows.
            alike: whether query and cache are both fp8 or neither, as FlashAttention wants them.
        """
        num_reqs = metadata.query_start_loc.shape[0] - 1
        if self.choice.of(num_reqs, max_rows) != "flash":
            return False
        if alike and metadata.num_actual_tokens == num_reqs * max_rows:
            return True
        self.choice.declined += 1
        return False

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
        metadata: Any,
        *,
        prefix_lens: torch.Tensor,
        multiprocessors: int,
        **batch: Any,
    ) -> None:
        """Compute a batch that `takes` took; arguments are `two_pass_attention`'s."""
        num_tokens = metadata.num_actual_tokens
        query = query[:num_tokens]
        # A metadata object is one forward pass's. What was planned before a capture is not in
        # its graph, so that replays would find another batch's plan.
        capturing = torch.cuda.is_current_stream_capturing()
        if self._planned is not metadata or self._capturing != capturing:
            names = ("query_start_loc", "max_rows", "max_seq_len", "soft_cap")
            self._plan = plan_prefix(
                query,
                kv_cache,
                prefix_lens=prefix_lens,
                multiprocessors=multiprocessors,
                **{name: batch[name] for name in names},
            )
            self._planned, self._capturing = metadata, capturing
        two_pass_attention(
            query,
            kv_cache,
            out[:num_tokens],
            prefix_lens=prefix_lens,
            multiprocessors=multiprocessors,
            prefix_attention=functools.partial(flash_prefix_attention, plan=self._plan),
            **batch,
        )


def why_not(layer: Attention) -> str | None:
    """Why a layer's trees can't be attended in two passes; None if they can."""
    impl: Any = layer.impl
    backend = layer.get_attn_backend().get_name()
    if backend != "FLASH_ATTN":
        return f"the attention backend is {backend}, not FLASH_ATTN"
    if impl.vllm_flash_attn_version != 3:
        return f"vLLM uses FlashAttention {impl.vllm_flash_attn_version} here, not 3"
    if impl.batch_invariant_enabled:
        return "VLLM_BATCH_INVARIANT is set, and splits depend on the batch"
    if impl.kv_cache_dtype.startswith("fp8") and not impl.supports_quant_query_input:
        return f"queries are not quantized beside the {impl.kv_cache_dtype} K/V cache"
    return None

"""A lower bound for the size of a page, derived from the model's configuration alone."""

from __future__ import annotations

from typing import Any

from vllm_graft.base.options import target_of

_SMALLEST_BLOCK = 16
"""Tokens per block that are assumed before the attention backend has chosen the block size."""

_UNEVEN = (
    "attention_chunk_size",
    "block_configs",
    "interleaved_sliding_window",
    "num_kv_shared_layers",
    "sliding_window",
)
"""Keys of a model's configuration that say that its layers keep different amounts of K/V."""


def least_page_bytes(vllm_config: Any, host_dtype: str | None) -> int:
    """The least bytes that a page takes on all ranks together.

    Args:
        vllm_config: vLLM's configuration, for the target or for a draft.
        host_dtype: the option ``host_dtype``.

    Returns:
        Bytes; 0 if the layers differ, so that the configuration alone gives no bound.
    """
    model = target_of(vllm_config)
    if model is None or not _is_even(model):
        return 0
    cache = vllm_config.cache_config
    itemsize = 1 if host_dtype == "fp8" else _itemsize(str(cache.cache_dtype), model)
    block = cache.block_size
    if not cache.user_specified_block_size:
        block = min(block or _SMALLEST_BLOCK, _SMALLEST_BLOCK)
    numbers = 2 * model.get_total_num_kv_heads() * model.get_head_size()
    return int(model.get_total_num_hidden_layers() * block * numbers * itemsize)


def _is_even(model: Any) -> bool:
    """Whether every layer keeps K and V of all its heads for every token."""
    if model.use_mla or model.is_hybrid or model.is_attention_free or model.is_encoder_decoder:
        return False
    text = model.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    return kinds <= {"full_attention"} and not any(getattr(text, key, None) for key in _UNEVEN)


def _itemsize(cache_dtype: str, model: Any) -> int:
    if cache_dtype == "auto":
        return int(model.dtype.itemsize)
    if cache_dtype.startswith("fp8"):
        return 1
    return 2 if cache_dtype in ("bfloat16", "float16", "half") else 0

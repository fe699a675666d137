"""A lower bound of a page's bytes, from the model's configuration alone."""

from __future__ import annotations

from typing import Any

_SMALLEST_BLOCK = 16
"""Tokens of a block, where the attention's backend has yet to choose them."""

_UNEVEN = (
    "attention_chunk_size",
    "block_configs",
    "interleaved_sliding_window",
    "num_kv_shared_layers",
    "sliding_window",
)
"""Keys of a model's configuration with which its layers do not all keep the same K/V."""


def least_page_bytes(vllm_config: Any, host_dtype: str | None) -> int:
    """Bytes that a page takes at least, on all ranks together; 0 where that is not simple.

    Args:
        vllm_config: vLLM's, for the target or for a draft.
        host_dtype: type of K/V on the host, as the configuration says.
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


def target_of(vllm_config: Any) -> Any:
    """The target's configuration, also out of one that vLLM derived for the draft model."""
    speculative = vllm_config.speculative_config
    return getattr(speculative, "target_model_config", None) or vllm_config.model_config


def _is_even(model: Any) -> bool:
    """Whether each layer keeps K and V of all its heads for every token."""
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

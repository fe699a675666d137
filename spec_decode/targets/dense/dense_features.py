"""What plain attention of targets may have beside heads of one size."""

from typing import Any

from vllm_graft.hooks.feature import Feature, if_model_has

KV_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
"""Formats of K/V. The others pack scales or smaller numbers between the values, or are no e4m3."""

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
"""Backends whose K/V cache is ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``."""


def _size_of(model: Any, kind: str, *names: str) -> int | None:
    """The size that a configuration gives layers of a kind; None if there is no such layer."""
    text = model.hf_text_config
    types = getattr(text, "layer_types", None)
    # A window that no layer uses (Qwen2 lists "full_attention" only) does no harm.
    used = types is None or any(kind in each for each in types)
    sizes = (getattr(text, name, None) for name in names)
    return next((size for size in sizes if size and used), None)


def _windows(model: Any) -> str:
    window = _size_of(model, "sliding", "sliding_window", "interleaved_sliding_window")
    return f"has sliding-window layers (window {window})" if window else ""


def chunks_of(model: Any) -> str:
    """What a model has of chunked attention, as the words after "The target"; empty for none."""
    chunk = _size_of(model, "chunked", "attention_chunk_size")
    return f"has chunked-attention layers (chunk {chunk})" if chunk else ""


def _shared(model: Any) -> str:
    shared = getattr(model.hf_text_config, "num_kv_shared_layers", 0)
    return "shares K/V between layers" if shared else ""


def _has_window(layer: Any) -> bool:
    # A layer with MLA keeps its window itself.
    windows = (getattr(each, "sliding_window", None) for each in (layer, layer.impl))
    return any(window not in (None, -1, (-1, -1)) for window in windows)


_SLOTS = "It reads a key's distance from its slot, which in a tree is not its depth."

DENSE: tuple[Feature, ...] = (
    Feature(
        "ALiBi",
        _SLOTS,
        in_model=if_model_has("uses_alibi", "uses ALiBi"),
        in_layer=lambda layer: getattr(layer.impl, "alibi_slopes", None) is not None,
    ),
    Feature(
        "sliding-window attention",
        _SLOTS,
        in_model=_windows,
        in_layer=_has_window,
        or_else="give --disable-sliding-window",
    ),
    Feature(
        "chunked attention",
        _SLOTS,
        in_model=chunks_of,
        in_layer=lambda layer: bool(getattr(layer, "attention_chunk_size", None)),
    ),
    Feature(
        "attention sinks",
        "The tree kernel leaves them out of the denominator.",
        in_layer=lambda layer: getattr(layer.impl, "sinks", None) is not None,
    ),
    Feature(
        "K/V shared with another layer",
        "Compaction moves K/V layer by layer and would move such a cache twice.",
        in_model=_shared,
        in_layer=lambda layer: getattr(layer, "kv_sharing_target_layer_name", None) is not None,
    ),
    Feature(
        "K and V heads of different sizes",
        "The tree kernel reads K and V as halves of one row.",
        # A layer with MLA has one head, whose value is a part of its key.
        in_layer=lambda layer: getattr(layer, "head_size_v", layer.head_size) != layer.head_size,
    ),
)

"""Sliding windows and chunks: what a layer of vLLM has, and where it begins for a row."""

from __future__ import annotations

from typing import Any


def window_of(impl: Any) -> int:
    """The positions that a row of a layer sees, its own among them; 0 for all.

    Args:
        impl: vLLM's ``AttentionImpl``. GPU backends keep a pair, keys before and behind a row; the
            CPU's backend keeps the number itself.
    """
    window = getattr(impl, "sliding_window", None)
    if isinstance(window, (tuple, list)):
        window = window[0] + 1
    return max(0, window or 0)


def chunk_of(layer: Any) -> int:
    """The positions that share a chunk in a layer of vLLM's ``ChunkedLocalAttention``; else 0."""
    return getattr(layer, "attention_chunk_size", None) or 0


def first_key(position: int, window: int, *, chunked: bool = False) -> int:
    """The position of the first key that a row at `position` sees.

    Args:
        position: of the row.
        window: the size of the window, or of a chunk; 0 for all keys.
        chunked: whether it is the size of a chunk, whose first key is a multiple of it.
    """
    if not window:
        return 0
    return position // window * window if chunked else max(0, position - window + 1)

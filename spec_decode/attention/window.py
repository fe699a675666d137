"""Sliding windows: what a layer of vLLM has, and where it begins for a row."""

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


def first_key(position: int, window: int) -> int:
    """The position of the first key that a row at `position` sees; `window` is 0 for all keys."""
    return max(0, position - window + 1) if window else 0

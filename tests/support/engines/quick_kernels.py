"""Fewer programs of interpreted kernels, and much of their work at once, for engines of tests."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from vllm_graft.spec_decode.kernels import expand, order, sizes, topk

ROW = 2048
"""The shipped pair's vocabulary: a program ranks a whole row of it, and not a fourth."""


def best_of(left: Any, index: Any, COUNT: Any, COUNT_PAD: Any) -> Any:
    """Return what `order.best_of` does, by one sort in place of `COUNT` searches."""
    count, pad = (getattr(each, "value", each) for each in (COUNT, COUNT_PAD))
    places = index.handle.data.astype(np.int64)
    # Larger is better: both numbers have 31 bits and a sign, and no index is negative.
    keys = (left.handle.data.astype(np.int64) << 31) - places
    kept = min(count, len(keys))
    top = np.sort(np.partition(keys, len(keys) - kept)[len(keys) - kept :])[::-1]
    values = -(-top >> 31)
    best, chosen = np.full(pad, order.NONE.value, np.int32), np.zeros(pad, np.int32)
    best[:kept] = values
    missing = values == order.NONE.value
    chosen[:kept] = np.where(missing, places.min(), (values << 31) - top)
    kind = tl.block_type(tl.int32, [pad])
    return tuple(tl.tensor(TensorHandle(each, tl.int32), kind) for each in (best, chosen))


def quicken(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let interpreted kernels of this process work so, in as few programs as there are rows.

    `put` sets an attribute: that of pytest's `MonkeyPatch` ends with the
    test.
    """
    for kernels in (topk, expand):
        put(kernels, "best_of", best_of)
    put(sizes, "_MIN_BLOCK", ROW)

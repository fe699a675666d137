"""Fewer programs of interpreted kernels, and much of their work at once, for engines of tests."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle
from vllm.v1.attention.backends import triton_attn
from vllm.v1.worker.gpu.sample import gumbel

from vllm_graft.spec_decode.kernels import candidates, sizes, topk
from vllm_graft.spec_decode.kernels.attention import attention_call

ROW = 2048
"""The shipped pair's vocabulary: a program ranks a whole row of it, and not a fourth."""


def best_of(left: Any, index: Any, COUNT: Any, COUNT_PAD: Any) -> Any:
    """Return what `topk.best_of` does, by one sort in place of `COUNT` searches."""
    count, pad = (getattr(each, "value", each) for each in (COUNT, COUNT_PAD))
    places = index.handle.data.astype(np.int64)
    # Larger is better: both numbers have 31 bits and a sign, and no index is negative.
    keys = (left.handle.data.astype(np.int64) << 31) - places
    kept = min(count, len(keys))
    top = np.sort(np.partition(keys, len(keys) - kept)[len(keys) - kept :])[::-1]
    values = -(-top >> 31)
    best, chosen = np.full(pad, topk.NONE.value, np.int32), np.zeros(pad, np.int32)
    best[:kept] = values
    missing = values == topk.NONE.value
    chosen[:kept] = np.where(missing, places.min(), (values << 31) - top)
    kind = tl.block_type(tl.int32, [pad])
    return tuple(tl.tensor(TensorHandle(each, tl.int32), kind) for each in (best, chosen))


def hashed(seed: Any, position: Any, token: Any, start: Any = 0) -> Any:
    """Return what `topk._hashed` and vLLM's own function do, in the same 32-bit integers."""
    start = getattr(start, "value", start)
    long = [each.handle.data.astype(np.int64) for each in (seed, position, token)]
    words = (long[0], long[0] >> 32, long[1], long[2])
    state: Any = np.zeros(token.handle.data.shape, np.uint32) + np.uint32(start)
    for word in words:
        mixed = (word & 0xFFFFFFFF).astype(np.uint32) * np.uint32(0xCC9E2D51)
        state ^= (mixed << 15 | mixed >> 17) * np.uint32(0x1B873593)
        state = (state << 13 | state >> 19) * np.uint32(5) + np.uint32(0xE6546B64)
    state ^= 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * np.uint32(factor)
    kind = token.type.with_element_ty(tl.uint32) if token.type.is_block() else tl.uint32
    return tl.tensor(TensorHandle(state ^ state >> 16, tl.uint32), kind)


def store_kv(stock: Callable[..., None]) -> Callable[..., None]:
    """vLLM's function that stores K/V of tokens, without a program for each of them."""

    def store(key: Any, value: Any, keys: Any, values: Any, slots: Any, *rest: Any) -> None:
        if keys.dtype != key.dtype or keys.dim() != 4:
            return stock(key, value, keys, values, slots, *rest)
        first = slots.clamp(min=0)
        block, place = first // keys.shape[1], first % keys.shape[1]
        # Padding leaves slot 0, of the null block, as it is.
        real = (slots >= 0)[:, None, None]
        for given, cache in ((key, keys), (value, values)):
            cache[block, place] = torch.where(real, given[: len(slots)], cache[block, place])
        return None

    return store


def quicken(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let interpreted kernels of this process work so, in as few programs as there are rows.

    Attention has one split. `put` sets an attribute: that of pytest's `MonkeyPatch` ends with the
    test.
    """
    for kernels in (topk, candidates):
        put(kernels, "best_of", best_of)
    put(topk, "_hashed", hashed)
    put(gumbel, "murmur3_hash32", hashed)
    put(sizes, "_MIN_BLOCK", ROW)
    put(attention_call, "_device_of", lambda device: (1, (0, 0)))
    put(triton_attn, "MIN_LAUNCH_GRID_SIZE_2D", 0)
    name = "triton_reshape_and_cache_flash"
    put(triton_attn, name, store_kv(getattr(triton_attn, name)))

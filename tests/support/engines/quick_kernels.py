"""Fewer programs of interpreted kernels, and whole launches at once, for engines of tests."""

from collections.abc import Callable
from typing import Any

import torch
from triton.runtime.interpreter import GridExecutor
from vllm.v1.attention.backends import triton_attn
from vllm.v1.worker import mamba_utils

from tests.support.engines.quick_launches import quick
from vllm_graft.spec_decode.kernels.attention import attention_plan


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

    Attention has one split, and a recurrent state is copied in one piece. `put` sets an attribute:
    that of pytest's `MonkeyPatch` ends with the test.
    """
    put(GridExecutor, "__call__", quick(GridExecutor.__call__))
    put(attention_plan, "_device_of", lambda device: (1, (0, 0)))
    put(triton_attn, "MIN_LAUNCH_GRID_SIZE_2D", 0)
    put(mamba_utils, "_TEMPORAL_TILES", 1)
    name = "triton_reshape_and_cache_flash"
    put(triton_attn, name, store_kv(getattr(triton_attn, name)))

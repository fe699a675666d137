"""Engines on a device whose target has MLA, by the platform's backends, and prompts for them.

These backends compute in 16 bits. A tree's rows and a decode are rounded otherwise, so answers may
part where two tokens are about equally probable, and nowhere else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.engines.gpu_engines import exact_engine
from tests.support.models.random_models import VOCABULARY

TOKENS = 24
NEAR = {"float16": 0.05, "bfloat16": 0.25, "fp8": 0.5}
"""Largest gap of log-probabilities that rounding explains, by the cache's format. Between the
target in float32 and in 16 bits they differ by up to 0.009 and 0.07 on a CPU."""

_RANDOM = random.Random(0)
PROMPTS = [
    [_RANDOM.randrange(2, VOCABULARY) for _ in range(length)]
    for length in (5, 40, 300, 17, 3, 90, 64, 130, 33, 8, 21, 70)
]
"""More than run at once, so that prompts meet trees; one is longer than a step's tokens."""


def near(dtype: str, cache: str) -> float:
    """The value of `NEAR` for a model's and a cache's format."""
    return NEAR[dtype if cache == "auto" else cache]


@contextmanager
def latent_engine(
    request: pytest.FixtureRequest,
    target: str,
    backend: str,
    dtype: str,
    cache: str = "auto",
    *,
    tokens: int = 0,
    speculative: dict[str, Any] | None = None,
    **tree: Any,
) -> Iterator[Any]:
    """An engine with so many drafts, in chains or, with keys of ``graft.tree``, in trees."""
    if backend == "FLASH_ATTN_MLA":
        request.getfixturevalue("flash_attention_3")
    options: dict[str, Any] = {"additional_config": {"graft": {"tree": tree}}} if tree else {}
    if tokens:
        options["speculative_config"] = {**(speculative or {}), "num_speculative_tokens": tokens}
    with exact_engine(
        target,
        drafts=tokens,
        requests=(1, 2, 4),
        exact=False,
        dtype=dtype,
        kv_cache_dtype=cache,
        attention_backend=backend,
        block_size=64,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**28,
        **options,
    ) as llm:
        yield llm

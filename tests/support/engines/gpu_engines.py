"""Engines on a device, in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.testing import running

if TYPE_CHECKING:
    from vllm import LLM


@contextmanager
def shipped_trees(
    eagle: dict[str, Any],
    *,
    graphs: bool = True,
    options: dict[str, Any] | None = None,
    **speculative: Any,
) -> Iterator[LLM]:
    """Run trees of up to 15 nodes, topk 4, 4 steps, with more keys of `graft.tree` and of vLLM.

    Without `graphs` each pass is launched. `options` are more ones of `vllm.LLM`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        with running(
            SHIPPED / "target",
            speculative_config={
                "method": "eagle3",
                "model": str(SHIPPED / "eagle3"),
                "num_speculative_tokens": 15,
                **speculative,
            },
            additional_config={"graft": {"tree": {"topk": 4, "steps": 4, **eagle}}},
            enforce_eager=not graphs,
            max_model_len=512,
            max_num_seqs=8,
            gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=2**30,
            enable_prefix_caching=False,
            disable_log_stats=False,
            **(options or {}),
        ) as built:
            yield built


@contextmanager
def exact_engine(
    target: str | Path,
    *,
    drafts: int = 0,
    requests: Sequence[int] = (1, 2, 4, 8),
    graphs: str = "FULL_DECODE_ONLY",
    exact: bool = True,
    **options: Any,
) -> Iterator[LLM]:
    """Run a target in float32, in which kernels that round differently agree on the tokens.

    Decodes of so many `requests` run in FULL graphs, without torch.compile, which would take most
    of the test's time. `drafts` says how many there are where `options` ask for them.
    """
    sizes = sorted({*requests} | {count * (drafts + 1) for count in requests})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        if exact:
            # Triton's products of float32 are exact only if it is told so.
            patch.setenv("TRITON_F32_DEFAULT", "ieee")
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "attention_backend": "TRITON_ATTN",
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": graphs,
                "cudagraph_capture_sizes": sizes,
            },
            "max_model_len": 256,
            "max_num_seqs": 8,
            "gpu_memory_utilization": 0.3,
            "kv_cache_memory_bytes": 2**29,
            "disable_log_stats": False,
        }
        with running(target, **defaults | options) as built:
            yield built


def two_rank_options(nodes: int) -> dict[str, Any]:
    """Options of an engine of two ranks, whose decodes of trees of `nodes` run in FULL graphs."""
    counts = (1, 2, 4, 8)
    return {
        "tensor_parallel_size": 2,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 2**29,
        "disable_log_stats": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted({*counts} | {n * (nodes + 1) for n in counts}),
        },
    }

"""An engine of the shipped pair on a device, in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.shipped_pair import SHIPPED
from vllm_graft.testing import running

if TYPE_CHECKING:
    from vllm import LLM


@contextmanager
def shipped_trees(eagle: dict[str, Any], **speculative: Any) -> Iterator[LLM]:
    """Run trees of up to 15 nodes, topk 4, 4 steps, with more keys of `graft.tree` and of vLLM."""
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
            max_model_len=512,
            max_num_seqs=8,
            gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=2**30,
            enable_prefix_caching=False,
            disable_log_stats=False,
        ) as built:
            yield built

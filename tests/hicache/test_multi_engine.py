"""Two of our connectors below one ``MultiConnector``, compared with an engine without any."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.cache_engines import generate, prompts, transfer
from vllm_graft.testing import cpu_engine, model_runner

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("reads_pay")]


def _two(folder: Path) -> dict[str, Any]:
    """Configure host memory of 32 and 64 pages, both with storage, so that regions are shared."""
    children = []
    for number, size in enumerate(("1MiB", "2MiB")):
        storage = {"backend": "segments", "path": str(folder / str(number)), "max_bytes": "8MiB"}
        given = transfer(host_bytes=size, load="async", storage=storage)
        children.append({key: given[key] for key in given if key != "kv_load_failure_policy"})
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }


def test_each_has_host_memory_of_its_own(llama: Path, tmp_path: Path) -> None:
    """Both have the same id, which once gave both the same file, with the second one's size."""
    options: dict[str, Any] = {"num_gpu_blocks_override": 24, "enable_prefix_caching": True}
    batches = [prompts(seed, 200, 150, 90, 170) for seed in range(8)]
    with cpu_engine(llama, **options) as llm:
        expected = [generate(llm, batch, 4)[0] for batch in batches]
    with cpu_engine(llama, kv_transfer_config=_two(tmp_path), **options) as llm:
        cached = 0
        for _ in range(2):
            for batch, tokens in zip(batches, expected):
                found, hits = generate(llm, batch, 4)
                assert found == tokens
                cached += sum(hits)
        children = model_runner(llm).kv_connector.kv_connector.sub_connectors
        pools = [child.worker._pool for child in children]
        assert [pool.shape.num_slots for pool in pools] == [32, 64]
        assert len({os.fstat(pool._fd).st_ino for pool in pools}) == 2
        # Pages that no host memory holds come from the storage of the first child that has them.
        assert cached > 1000, cached

"""A primary tier's memory, and our tier for vLLM's own connector below it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from vllm_graft.hicache.native.native_tier import SegmentsTier

CHUNKS, CHUNK_BYTES = 8, 4096
CONTEXT = ReqContext(req_id="test")


def key(number: int, group: int = 0) -> OffloadKey:
    return make_offload_key(number.to_bytes(8, "big"), group)


def spec(events: bool = False, model: str = "test", **parallel: Any) -> Any:
    """Make the part of an OffloadingSpec that a tier sees."""
    geometry: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
    }
    config = OffloadingConfig(
        groups=(),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=events,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig(name=model, dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(**(geometry | parallel)),
    )
    return SimpleNamespace(
        config=config, blocks_per_chunk=1, kv_events_config=OffloadingKVEventsConfig(events, False)
    )


class Host:
    """A primary tier's memory, and a tier below it."""

    def __init__(self, path: Path, offloading: Any = None, **options: Any) -> None:
        self.memory = np.zeros((CHUNKS, CHUNK_BYTES // 4), dtype=np.float32)
        config = {"type": "SegmentsTier", "module_path": "vllm_graft.hicache.native.native_tier"}
        config |= {"path": str(path), "max_bytes": "8MiB", "weights": "v1"}
        tier = SecondaryTierFactory.create_secondary_tier(
            {**config, **options}, self.memory.data, offloading or spec()
        )
        assert isinstance(tier, SegmentsTier)
        self.tier = tier
        self.jobs = 0

    def job(self, keys: list[OffloadKey], chunks: list[int], load: bool) -> JobResult:
        self.jobs += 1
        ids = np.array(chunks, dtype=np.int64)
        submit = self.tier.submit_load if load else self.tier.submit_store
        submit(TransferJob(self.jobs, keys, ids, load, CONTEXT))
        self.tier.drain_jobs()
        [result] = self.tier.get_finished_jobs()
        assert result.job_id == self.jobs
        return result

    def lookup(self, *keys: OffloadKey) -> list[LookupResult]:
        return [self.tier.lookup(one, CONTEXT) for one in keys]

    def fill(self, seed: int) -> np.ndarray[Any, Any]:
        self.memory[:] = np.random.default_rng(seed).random(self.memory.shape)
        return self.memory.copy()

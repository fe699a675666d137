"""Configurations of the host KV cache, and questions to engines that have it."""

import random
from pathlib import Path
from typing import Any

CACHED = {"kv_connector": "HiCacheConnector", "kv_role": "kv_both"}


def transfer(**extra: Any) -> dict[str, Any]:
    """Make a ``kv_transfer_config`` with our connector; failed loads are recomputed."""
    extra = {"host_bytes": "32MiB", **extra}
    return {**CACHED, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}


def stored(path: Path, max_bytes: str = "1GiB") -> dict[str, Any]:
    """Make options of loads before a request runs, which waits for all that is below ``path``."""
    return {
        "load": "async",
        "storage": {"backend": "segments", "path": str(path), "max_bytes": max_bytes},
        "prefetch": {"policy": "wait_complete"},
    }


def prompts(seed: int, *lengths: int) -> list[Any]:
    """Draw random prompts of token ids."""
    numbers = random.Random(seed)
    return [
        {"prompt_token_ids": [numbers.randrange(5, 500) for _ in range(length)]}
        for length in lengths
    ]


def generate(llm: Any, batch: list[Any], max_tokens: int = 12) -> tuple[list[list[int]], list[int]]:
    """Generate greedy tokens; return them and how many tokens of each prompt were cached."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate(batch, params, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, [output.num_cached_tokens for output in outputs]


def connector(llm: Any) -> Any:
    """Return the scheduler's connector of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def metrics(llm: Any) -> dict[str, float]:
    """Return counters and gauges of the host KV cache, by name."""
    prefix = "vllm:graft_hicache_"
    return {
        metric.name.removeprefix(prefix): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(prefix)
    }

"""How ``vllm serve`` is told to serve a target with its EAGLE-3 head, in a few gigabytes."""

import importlib.util
import json
import time
from importlib import metadata
from pathlib import Path

from tests.support.engines.vllm_server import SpecDecodeCounters, VllmServer

MODEL = "pair"
"""Name of the model in requests."""

SETTLE_SECONDS = 1
"""vLLM counts a step just after the step's answer has left."""


def require_cpu_server() -> None:
    """Skip a module where spawned processes lack the interpreter or `vllm serve` its version."""
    import pytest
    import torch

    if torch.cuda.is_available():
        pytest.skip("vllm serve on a CPU", allow_module_level=True)
    try:
        metadata.version("vllm")
        found = importlib.util.find_spec("_vllm_graft_startup")
    except metadata.PackageNotFoundError:
        found = None
    if found is None:
        pytest.skip("run `python -m vllm_graft.testing.environment` first", allow_module_level=True)


def speculate(pair: Path, tokens: int) -> tuple[str, ...]:
    """Flags that draft `tokens` tokens with the head in the folder `pair`."""
    config = {"method": "eagle3", "model": str(pair / "eagle3"), "num_speculative_tokens": tokens}
    return ("--speculative-config", json.dumps(config))


def server_settings(pair: Path, cuda: bool) -> tuple[list[str], dict[str, str]]:
    """Flags and environment with which the target in the folder `pair` is served."""
    flags = [str(pair / "target"), "--served-model-name", MODEL]
    flags += ["--max-model-len", "512", "--max-num-seqs", "8"]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    if cuda:
        # In bfloat16 two tokens often have the same logit, and which of them is chosen depends on
        # how a kernel rounds. Triton's products of float32 are exact only if it is told so.
        flags += ["--dtype", "float32", "--attention-backend", "TRITON_ATTN"]
        environment |= {"TRITON_F32_DEFAULT": "ieee"}
        # The pair takes 10 MB; the default would take nearly the whole device for its cache. The
        # size of the cache is given because servers that start together can't measure free memory.
        flags += ["--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(2**30)]
    else:
        flags += ["--dtype", "float32", "--enforce-eager"]
        environment |= {"VLLM_GRAFT_INTERPRET": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return flags, environment


def settled_counters(server: VllmServer) -> SpecDecodeCounters:
    """Read the counters once the last step is in them."""
    time.sleep(SETTLE_SECONDS)
    return server.counters()

"""Two data-parallel ranks of a model with experts: a rank without requests runs dummy batches.

The ranks compute their experts together, so a rank that has nothing to do takes part in each step
with a dummy batch, and so does its drafter of trees.
"""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.models.window_models import BLOCK, write_gpt_oss
from vllm_graft.testing import greedy, write_eagle3
from vllm_graft.testing.vllm_server import VllmServer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

PROMPTS = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 90)), [11, 12, 13, 14]]
TOKENS, NODES = 24, 7


def complete(server: VllmServer, prompt: list[int]) -> list[int]:
    """Token ids of a greedy answer."""
    body = {
        "model": "experts",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        ids: list[int] = json.load(response)["choices"][0]["token_ids"]
    return ids


def test_ranks_without_requests_follow_with_dummy_batches(tmp_path: Path) -> None:
    target, draft = write_gpt_oss(tmp_path / "target"), write_eagle3(tmp_path / "draft")
    with exact_engine(target, block_size=BLOCK, skip_tokenizer_init=True) as llm:
        expected = greedy(llm, PROMPTS, TOKENS)
    speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": NODES}
    compilation = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
    }
    graft = {"graft": {"tree": {"topk": 2, "steps": 4}}}
    flags = [
        *(str(target), "--served-model-name", "experts"),
        *("--tokenizer", str(SHIPPED / "target")),
        *("--data-parallel-size", "2", "--dtype", "float32", "--block-size", str(BLOCK)),
        *("--attention-backend", "TRITON_ATTN", "--max-model-len", "256", "--max-num-seqs", "4"),
        *("--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(2**29)),
        *("--compilation-config", json.dumps(compilation)),
        *("--speculative-config", json.dumps(speculative)),
        *("--additional-config", json.dumps(graft)),
    ]
    environment = {
        "TRITON_F32_DEFAULT": "ieee",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    }
    with VllmServer(flags, tmp_path / "server.log", environment) as server:
        server.wait_ready(240)
        # One at a time: the other rank has none.
        assert [complete(server, prompt) for prompt in PROMPTS] == expected
        # Both ranks have requests, of different lengths, so that one ends before the other.
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(lambda prompt: complete(server, prompt), PROMPTS)) == expected
        assert server.counters().drafts > 0

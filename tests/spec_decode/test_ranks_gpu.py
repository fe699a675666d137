"""Ranks on two GPUs: tensor-parallel ones draft the same trees, data-parallel ones never wait."""

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import rank_answers
from tests.support.engines.cache_engines import transfer
from tests.support.engines.gpu_engines import exact_engine, two_rank_options
from tests.support.engines.pairs import Answer, Pair, Request, answer_all
from tests.support.engines.rank_answers import Questions, RankAnswers
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.engines.vllm_server import VllmServer
from tests.support.models.window_models import BLOCK, write_gpt_oss
from vllm_graft.spec_decode.trees.tree import CHECK_RANKS
from vllm_graft.testing import greedy, write_eagle3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

NODES = 15


@pytest.fixture
def trees_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all ranks compare their trees after each step."""
    monkeypatch.setenv(CHECK_RANKS, "1")


@pytest.fixture(scope="module")
def alone(pair: Pair, samples: list[Request]) -> Iterator[list[Answer]]:
    with exact_engine(pair.target) as llm:
        yield answer_all(llm, samples)


def two_gpus(
    pair: Pair, samples: list[Request], folder: Path, tree: dict[str, Any], **options: Any
) -> RankAnswers:
    """Ask an engine of two ranks twice, whose decodes run in FULL graphs."""
    engine = {
        "model": pair.target,
        **two_rank_options(NODES),
        "speculative_config": {
            "method": "eagle3",
            "model": pair.draft,
            "num_speculative_tokens": NODES,
        },
        "additional_config": {"graft": {"tree": {"topk": 4, "steps": 4, **tree}}},
        **options,
    }
    return rank_answers.ask(folder, Questions(engine, samples, rounds=2), cuda=True)


def checked(found: RankAnswers) -> list[dict[str, Any]]:
    """What both ranks say of their trees, which were compared in as many steps."""
    trees = [rank["counters"]["tree"] for rank in found.ranks]
    assert len(trees) == 2
    assert trees[0]["rank_checks"] == trees[1]["rank_checks"] > 0
    return trees


@pytest.mark.usefixtures("trees_are_compared")
def test_trees_of_two_gpus_answer_as_one(
    pair: Pair, samples: list[Request], alone: list[Answer], tmp_path: Path
) -> None:
    """The second round finds its prompts in the host's memory; graphs are verified by launches."""
    found = two_gpus(
        pair,
        samples,
        tmp_path,
        {"graph_runner": "verify"},
        dtype="float32",
        attention_backend="TRITON_ATTN",
        kv_transfer_config=transfer(load="async"),
    )
    assert found.rounds == [alone, alone]
    assert found.metrics["vllm:graft_hicache_hit_tokens_host"] > 0
    trees = checked(found)
    assert trees[0]["draft_graphs_verified"] == trees[1]["draft_graphs_verified"] != {}
    assert not any(trees[0]["draft_graphs_differing"].values())


@pytest.mark.usefixtures("trees_are_compared")
def test_ranks_choose_the_same_trees_and_kernels(
    pair: Pair, samples: list[Request], tmp_path: Path
) -> None:
    """Measured costs and times decide; both ranks take the same decisions."""
    found = two_gpus(pair, samples, tmp_path, {"shape": "auto"}, dtype="bfloat16")
    trees = checked(found)
    assert trees[0]["attention"] == trees[1]["attention"]
    assert trees[0]["verify_steps"] == trees[1]["verify_steps"]
    assert found.metrics["vllm:spec_decode_num_accepted_tokens"] > 0


PROMPTS = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 90)), [11, 12, 13, 14]]
TOKENS, EXPERTS_NODES = 24, 7


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


@pytest.mark.parametrize("shape", ["fixed", "auto"])
def test_ranks_without_requests_follow_with_dummy_batches(shape: str, tmp_path: Path) -> None:
    target, draft = write_gpt_oss(tmp_path / "target"), write_eagle3(tmp_path / "draft")
    with exact_engine(target, block_size=BLOCK, skip_tokenizer_init=True) as llm:
        expected = greedy(llm, PROMPTS, TOKENS)
    speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": EXPERTS_NODES}
    compilation = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
    }
    graft = {"graft": {"tree": {"topk": 2, "steps": 4, "shape": shape}}}
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

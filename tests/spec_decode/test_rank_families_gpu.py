"""Every kind of drafter and target on two GPUs, as tensor-parallel ranks: answers are the target's.

In float32 they are equal. Where vLLM's kernels need 16 bits, greedy answers may part at near ties.
All ranks compare their trees after each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.answers import near_ties
from tests.support.answers.text_requests import COMPACT, greedy, seeded, structured_requests
from tests.support.engines import rank_answers
from tests.support.engines.block_engines import FROM_LAST
from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.pairs import Answer, Pair, Request, answer_all
from tests.support.engines.rank_answers import Questions
from tests.support.models.block_drafts import DEPTH, write_block_target, write_dspark
from tests.support.models.latent_models import write_target
from tests.support.models.lora_adapters import write_adapter
from tests.support.models.mtp_targets import write_glm4_moe
from tests.support.models.served_qwen import (
    image_request,
    write_served_qwen3_5,
    write_text_qwen3_5,
)
from tests.support.models.window_models import BLOCK, windowed_pair, write_gpt_oss
from vllm_graft.spec_decode.trees.reference import KEY
from vllm_graft.spec_decode.verification.rank_check import CHECK_RANKS
from vllm_graft.testing import write_eagle3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

NODES, TOKENS = 15, 32
TREE = {"topk": 4, "steps": 4}
PROMPTS: list[Any] = [
    {"prompt_token_ids": ids}
    for ids in ([7, 3, 9, 30, 2], [5] * 40, list(range(1, 90)), [11, 12, 13, 14])
]


@dataclass
class Family:
    """An engine with trees, and requests to it.

    Attributes:
        options: of ``vllm.LLM``, for the target alone, too.
        near: the largest gap of near ties in 16 bits; 0 where answers have to be equal.
        accepts: whether the draft predicts anything.
    """

    target: str | Path
    speculative: dict[str, Any]
    requests: list[Request]
    options: dict[str, Any] = field(default_factory=dict)
    tree: dict[str, Any] = field(default_factory=lambda: dict(TREE))
    graft: dict[str, Any] = field(default_factory=dict)
    near: float = 0.0
    accepts: bool = True


def eagle(draft: str | Path, nodes: int = NODES) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(draft), "num_speculative_tokens": nodes}


def mtp(target: str | Path, **more: Any) -> dict[str, Any]:
    return {"method": "mtp", "model": str(target), "num_speculative_tokens": NODES, **more}


def greedily(prompts: list[Any], **params: Any) -> list[Request]:
    asked = {"max_tokens": TOKENS, "temperature": 0, "logprobs": 5, **params}
    return [Request(prompt, dict(asked)) for prompt in prompts]


def eagle3(folder: Path, pair: Pair) -> Family:
    requests = greedy(TOKENS, pair.prompts[:4]) + seeded(TOKENS, pair.prompts[:4])
    return Family(pair.target, eagle(pair.draft), requests)


def experts(folder: Path, pair: Pair) -> Family:
    target = write_glm4_moe(folder, from_states=0.2)
    return Family(target, mtp(target), greedy(TOKENS) + seeded(TOKENS))


def parallel_experts(folder: Path, pair: Pair) -> Family:
    family = experts(folder, pair)
    family.options["enable_expert_parallel"] = True
    return family


def dspark(folder: Path, pair: Pair) -> Family:
    target = write_block_target(folder / "target", from_last=FROM_LAST)
    draft = write_dspark(folder / "draft", from_last=FROM_LAST, error=0.3)
    speculative = {"method": "dspark", "model": str(draft), "num_speculative_tokens": NODES}
    tree = {"topk": 4, "steps": DEPTH - 1}
    return Family(target, speculative, greedy(TOKENS) + seeded(TOKENS), tree=tree)


def latents(folder: Path, pair: Pair) -> Family:
    target = write_target(folder, 16)
    options = {
        "dtype": "float16",
        "attention_backend": "TRITON_MLA",
        "block_size": 64,
        "skip_tokenizer_init": True,
    }
    return Family(target, mtp(target), greedily(PROMPTS), options, near=0.05)


def delta_rule(folder: Path, pair: Pair) -> Family:
    target = write_text_qwen3_5(folder, heads=(2, 4), head=128, hidden=256)
    options = {
        "dtype": "bfloat16",
        "mamba_ssm_cache_dtype": "float32",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 2**30,
        "additional_config": {"gdn_prefill_backend": "triton"},
    }
    tree = {**TREE, "recurrent": True}
    return Family(target, mtp(target), greedily(PROMPTS), options, tree, near=0.5)


def windows(folder: Path, pair: Pair) -> Family:
    narrow = windowed_pair(folder)
    requests = greedy(TOKENS, narrow.prompts[:4]) + seeded(TOKENS, narrow.prompts[:4])
    return Family(narrow.target, eagle(narrow.draft), requests, {"block_size": BLOCK})


def sinks(folder: Path, pair: Pair) -> Family:
    """Windows, sinks and experts; the head is random."""
    target, draft = write_gpt_oss(folder / "target"), write_eagle3(folder / "draft")
    requests = greedily(PROMPTS, logprobs=None)
    options = {"block_size": BLOCK, "skip_tokenizer_init": True}
    return Family(target, eagle(draft), requests, options, accepts=False)


def grammars(folder: Path, pair: Pair) -> Family:
    requests = structured_requests(pair, TOKENS)
    return Family(pair.target, eagle(pair.draft), requests, dict(COMPACT))


def adapters(folder: Path, pair: Pair) -> Family:
    """Two adapters, one of the output head as well, and the target itself in one batch."""
    folder.mkdir()
    given = [
        write_adapter(folder / "head", pair.target, 0, head=True),
        write_adapter(folder / "attention", pair.target, 1, head=False),
        None,
    ]
    asked = greedily(pair.prompts[:2])
    requests = [Request(each.prompt, each.params, adapter) for each in asked for adapter in given]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "dtype": "float16"}
    return Family(pair.target, eagle(pair.draft), requests, options, near=0.1)


def ngrams(folder: Path, pair: Pair) -> Family:
    """Beside the head; half of the requests have a prediction."""
    family = eagle3(folder, pair)
    family.tree["ngram"] = True
    with exact_engine(pair.target) as llm:
        answers = answer_all(llm, family.requests)
    for request, answer in list(zip(family.requests, answers, strict=True))[::2]:
        request.params["extra_args"] = {KEY: answer.tokens[0]}
    return family


def ngrams_alone(folder: Path, pair: Pair) -> Family:
    texts = [text * 2 for text in pair.prompts[:4]]
    speculative = {
        "method": "ngram_gpu",
        "num_speculative_tokens": NODES,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    requests = greedy(TOKENS, texts) + seeded(TOKENS, texts)
    return Family(pair.target, speculative, requests, {"max_model_len": 512})


def images(folder: Path, pair: Pair) -> Family:
    """Each rank has a part of the tower's weights."""
    target = write_served_qwen3_5(folder, heads=(2, 4), head=128, hidden=256)
    family = delta_rule(folder.with_name("text"), pair)
    del family.options["skip_tokenizer_init"]
    sizes = [[(64, 64)], [(96, 64), (64, 128)]]
    prompts = [image_request("what is it", each, seed) for seed, each in enumerate(sizes)]
    family.target, family.speculative = target, mtp(target)
    family.requests, family.graft = greedily(prompts), {"vit": {"memory": 64}}
    family.options["mm_encoder_tp_mode"] = "weights"
    return family


def spread_images(folder: Path, pair: Pair) -> Family:
    """Each rank has the whole tower, and some of the images."""
    family = images(folder, pair)
    family.options["mm_encoder_tp_mode"] = "data"
    return family


FAMILIES = [
    *(eagle3, experts, parallel_experts, dspark, latents, delta_rule, windows, sinks),
    *(grammars, adapters, ngrams, ngrams_alone, images, spread_images),
]


def with_trees(family: Family) -> dict[str, Any]:
    """The options of an engine of two ranks, whose decodes run in FULL graphs."""
    counts = (1, 2, 4, 8)
    options = {
        "model": str(family.target),
        "tensor_parallel_size": 2,
        "dtype": "float32",
        "attention_backend": "TRITON_ATTN",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 2**29,
        "disable_log_stats": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted({*counts} | {n * (NODES + 1) for n in counts}),
        },
        "speculative_config": family.speculative,
        **family.options,
    }
    graft = {"graft": {"tree": family.tree, **family.graft}}
    return options | {"additional_config": {**options.get("additional_config", {}), **graft}}


def as_logged(answers: list[Answer]) -> list[near_ties.Answer]:
    return [near_ties.Answer(each.tokens[0], each.logprobs[0]) for each in answers]


@pytest.mark.parametrize("make", FAMILIES)
def test_two_gpus_answer_as_the_target_alone(
    make: Callable[[Path, Pair], Family],
    pair: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CHECK_RANKS, "1")
    family = make(tmp_path / "models", pair)
    with exact_engine(family.target, exact=not family.near, **family.options) as llm:
        expected = answer_all(llm, family.requests)
    questions = Questions(with_trees(family), family.requests)
    found = rank_answers.ask(tmp_path, questions, cuda=True)
    [answers] = found.rounds
    if family.near:
        near_ties.check_near_ties(as_logged(answers), as_logged(expected), family.near)
    else:
        assert answers == expected
    trees = [rank["counters"]["tree"] for rank in found.ranks]
    assert trees[0]["rank_checks"] == trees[1]["rank_checks"] > 0
    if family.accepts:
        assert found.metrics["vllm:spec_decode_num_accepted_tokens"] > 0
    if "vit" in family.graft:
        assert all(rank["counters"]["vit"] for rank in found.ranks)


@pytest.mark.parametrize("shape", ["fixed", "auto"])
def test_data_parallel_ranks_answer_as_the_target_alone(
    shape: str, pair: Pair, tmp_path: Path
) -> None:
    """Target and module have experts, which lie on both cards; the second rank soon has no requests
    left. The first has one that reaches the model's length."""
    family = parallel_experts(tmp_path / "models", pair)
    family.tree["shape"] = shape
    family.requests[0].params["max_tokens"] = 256
    with exact_engine(family.target) as llm:
        expected = answer_all(llm, family.requests)
    engine = with_trees(family) | {"tensor_parallel_size": 1}
    questions = [Questions(engine, family.requests[:-1]), Questions(engine, family.requests[-1:])]
    found = rank_answers.ask_replicas(tmp_path, questions, cuda=True)
    assert [each.rounds for each in found] == [[expected[:-1]], [expected[-1:]]]
    counters = [each.ranks[0]["counters"]["tree"] for each in found]
    assert all(each["draft_replays"] > 0 for each in counters)

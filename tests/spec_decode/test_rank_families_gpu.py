"""Every kind of drafter and target on two GPUs: answers are the target's.

In float32 they are equal. Where vLLM's kernels need 16 bits, greedy answers may part at near ties.
Tensor-parallel ranks compare their trees after each step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.answers import near_ties
from tests.support.engines import rank_answers
from tests.support.engines import rank_families as families
from tests.support.engines.gpu_engines import exact_engine, two_rank_options
from tests.support.engines.pairs import Answer, Pair, answer_all
from tests.support.engines.rank_answers import Questions
from tests.support.engines.rank_families import NODES, Family
from vllm_graft.spec_decode.trees.tree import CHECK_RANKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

FAMILIES = [
    families.eagle3, families.experts, families.parallel_experts, families.dspark,
    families.latents, families.delta_rule, families.windows, families.sinks, families.grammars,
    families.adapters, families.ngrams, families.ngrams_alone, families.images,
    families.spread_images, families.draft_model,
]  # fmt: skip


def with_trees(family: Family) -> dict[str, Any]:
    """The options of an engine of two ranks, whose decodes run in FULL graphs."""
    asked = family.asked
    if asked["speculative_config"]["method"] == "dspark":
        # Else vLLM chooses a backend for a block by itself.
        asked["speculative_config"] = {"attention_backend": "TRITON_ATTN", **family.speculative}
    return {
        "model": str(family.target),
        "dtype": "float32",
        "attention_backend": "TRITON_ATTN",
        **two_rank_options(NODES),
        **family.options,
        **asked,
    }


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
    questions = Questions(with_trees(family), family.predict(expected))
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
    family = families.parallel_experts(tmp_path / "models", pair)
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

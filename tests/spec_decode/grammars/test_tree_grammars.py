"""Structured output in real engines: full trees, and the tokens of the target alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from vllm_graft.spec_decode.grammars import manager
from vllm_graft.spec_decode.grammars.packed_drafts import DraftTree, unpack
from vllm_graft.testing import spec_metrics
from vllm_graft.testing.pairs import Answer, Pair, Request, answer_all, differing, scheduling

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

GREEDY = {"temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["self", "return"]}, "ok": {"type": "boolean"}},
    "required": ["a", "ok"],
    "additionalProperties": False,
}
STRUCTURED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "JSON": ({"json": SCHEMA}, GREEDY),
    "JSON with a seed": ({"json": SCHEMA}, {"seed": 1, "temperature": 0.6}),
    "regex": ({"regex": r"( |\n)*(def|return|self)[ -z\n]{12,40}"}, GREEDY),
    "regex with a seed": ({"regex": r"[a-z_\.\(\) \n=]{12,60}"}, {"seed": 2, "top_k": 50}),
    "choice": ({"choice": ["return self", "raise ValueError", "self.x = None"]}, GREEDY),
    "grammar": ({"grammar": 'root ::= "self." name\nname ::= [a-z_]+'}, {"seed": 3}),
    "logprobs": ({"regex": r"[a-z_\.\(\) \n=]{12,60}"}, {**GREEDY, "logprobs": 2}),
}
PLAIN: list[dict[str, Any]] = [GREEDY, {"seed": 4}]
COMPACT: dict[str, Any] = {
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}
}
"""The pair's model would fill JSON with blank lines."""


@pytest.fixture(scope="module")
def asked(pair: Pair) -> list[Request]:
    """Structured requests, then plain ones."""
    from vllm.sampling_params import StructuredOutputsParams

    parameters: list[dict[str, Any]] = [
        {**params, "structured_outputs": StructuredOutputsParams(**structure)}
        for structure, params in STRUCTURED.values()
    ]
    return [
        Request(pair.prompts[1 + i % 5], {"max_tokens": 18, "ignore_eos": False, **params})
        for i, params in enumerate(parameters + PLAIN)
    ]


@pytest.fixture(scope="module")
def alone(pair: Pair, asked: list[Request]) -> list[Answer]:
    with pair.engine(**COMPACT) as llm:
        return answer_all(llm, asked)


def test_the_structures_are_kept(alone: list[Answer]) -> None:
    """This guards the tests below: what constrains nothing would test nothing."""
    whole = dict(zip(STRUCTURED, alone, strict=False))
    for kind in ("JSON", "JSON with a seed"):
        assert json.loads(whole[kind].texts[0]).keys() == {"a", "ok"}
    assert whole["choice"].texts[0] in STRUCTURED["choice"][0]["choice"]
    assert whole["grammar"].texts[0].startswith("self.")


def test_structured_output_gets_full_trees(
    pair: Pair, asked: list[Request], alone: list[Answer]
) -> None:
    structured = len(STRUCTURED)
    with pair.engine(nodes=15, **COMPACT) as llm:
        found = answer_all(llm, asked[:structured])
        (info,) = llm.collective_rpc("graft_info")
        assert spec_metrics(llm).acceptance_length > 1.2
    assert not differing(found, alone[:structured])
    counters = info["counters"]["tree"]
    assert counters["chain_requests"] == 0
    assert counters["chain_reasons"] == counters["chains"] == {}
    assert counters["verify_steps"] > 0
    for ours, theirs in zip(found[-1].logprobs[0], alone[structured - 1].logprobs[0], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_tokens_hold_when_crowded(pair: Pair, asked: list[Request], alone: list[Answer]) -> None:
    """Larger trees, plain requests beside, async scheduling, chunked prefill and preemption."""
    crowded: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 140,
        "num_gpu_blocks_override": 14,
        "async_scheduling": True,
        **COMPACT,
    }
    with pair.engine(nodes=31, topk=8, steps=3, **crowded) as llm, scheduling(llm) as seen:
        assert not differing(answer_all(llm, asked), alone)
        assert spec_metrics(llm).acceptance_length > 1.1
    assert seen.preempted > 0
    assert seen.chunks_beside_drafts > 0


def test_with_the_mask_of_the_row_before_tokens_differ(
    pair: Pair, asked: list[Request], alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the grammar takes the tree for a chain."""

    def chained(packed: Sequence[int]) -> DraftTree:
        tokens, parents = unpack(packed)
        return DraftTree(tokens, list(range(-1, len(parents) - 1)))

    monkeypatch.setattr(manager, "unpack", chained)
    with pair.engine(nodes=15, **COMPACT) as llm:
        assert differing(answer_all(llm, asked[2:5]), alone[2:5])

"""Structured output in real engines: full trees, and the tokens of the target alone."""

import json
from typing import Any

import pytest

from tests.support.answers.text_requests import COMPACT, STRUCTURED, structured_requests
from tests.support.engines.pairs import (
    Answer,
    Pair,
    Request,
    answer_all,
    crowded,
    differing,
    scheduling,
)
from vllm_graft.spec_decode.grammars.tree_grammars import NodeMasks
from vllm_graft.testing import spec_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PLAIN: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 4}]
TOKENS = 20


@pytest.fixture(scope="module")
def asked(pair: Pair) -> list[Request]:
    """Structured requests, the last of which wants logprobs, then plain ones."""
    plain = [
        Request(pair.prompts[3 + i], {"max_tokens": TOKENS, **params})
        for i, params in enumerate(PLAIN)
    ]
    return structured_requests(pair, TOKENS) + plain


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
    kinds = list(STRUCTURED)
    chosen = [kinds.index(kind) for kind in ("JSON", "regex with a seed", "choice", "logprobs")]
    expected = [alone[i] for i in chosen]
    with pair.engine(nodes=15, topk=4, steps=3, **COMPACT) as llm:
        found = answer_all(llm, [asked[i] for i in chosen])
        (info,) = llm.collective_rpc("graft_info")
        assert spec_metrics(llm).acceptance_length > 1.2
    assert not differing(found, expected)
    counters = info["counters"]["tree"]
    assert counters["verify_steps"] > 0
    for ours, theirs in zip(found[-1].logprobs[0], expected[-1].logprobs[0], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.nightly
def test_tokens_hold_when_crowded(pair: Pair, asked: list[Request], alone: list[Answer]) -> None:
    """Plain requests beside, async scheduling, chunked prefill and preemption, all at once."""
    few = crowded(blocks=12, **COMPACT)
    # The last two are plain ones.
    chosen = [0, 1, 3, 4, 7, 8]
    with pair.engine(nodes=15, **few) as llm, scheduling(llm) as seen:
        found = answer_all(llm, [asked[i] for i in chosen])
    assert not differing(found, [alone[i] for i in chosen])
    assert seen.preempted > 0
    assert seen.chunks_beside_drafts > 0


@pytest.mark.nightly
def test_with_the_mask_of_the_row_before_tokens_differ(
    pair: Pair, asked: list[Request], alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: each node has the mask of the row before, as if the tree were a chain."""
    fill = NodeMasks.fill

    def shifted(self: NodeMasks) -> None:
        fill(self)
        self.rows[1:] = self.rows[:-1].clone()

    monkeypatch.setattr(NodeMasks, "fill", shifted)
    strict = [0, 1, 4, 5]
    with pair.engine(nodes=15, **COMPACT) as llm:
        found = answer_all(llm, [asked[i] for i in strict])
    assert differing(found, [alone[i] for i in strict])

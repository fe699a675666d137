"""Structured output, penalties, bad words and thinking budgets on a device, in FULL graphs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.answers.structured_requests import COMPACT, structured_requests
from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.pairs import Pair, Request, answer_all, differing
from vllm_graft.testing import spec_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

PENALIZED: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.3},
    {"seed": 1, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"temperature": 0, "bad_words": ["return", "self", "import", "def", "pathname"]},
]
THINKING: dict[str, Any] = {
    "reasoning_config": {"reasoning_start_str": " hereby", "reasoning_end_str": " return self"}
}


def test_tokens_are_those_of_the_target_alone(pair: Pair) -> None:
    """Asynchronous scheduling is vLLM's default on a device."""
    requests = structured_requests(pair, 40) + [
        Request(pair.prompts[i], {"max_tokens": 40, **params})
        for i, params in enumerate([*PENALIZED, {"temperature": 0}, {"seed": 7}])
    ]
    # This prompt ends where the model begins to think.
    requests += [
        Request(
            pair.prompts[1], {"max_tokens": 20, "temperature": 0, "thinking_token_budget": budget}
        )
        for budget in (3, 4, 6)
    ]
    options = COMPACT | THINKING
    with exact_engine(pair.target, **options) as llm:
        expected = answer_all(llm, requests)
    assert all(" return self" in answer.texts[0] for answer in expected[-3:])
    tree = {"topk": 4, "steps": 4}
    with exact_engine(pair.target, draft=pair.draft, nodes=15, tree=tree, **options) as llm:
        assert differing(answer_all(llm, requests), expected) == []
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts / 4

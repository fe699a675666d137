"""A draft under torch.compile: vLLM drops the guards, so inputs must look as at compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.engines.pairs import Pair, Request, answer_all

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def drafted(pair: Pair, **options: Any) -> tuple[Any, Any]:
    """Return the answers, and how far drafts were accepted."""
    from vllm_graft.testing import spec_metrics

    asked = [Request(prompt, {"temperature": 0, "max_tokens": 12}) for prompt in pair.prompts[:3]]
    with pair.engine(nodes=15, max_num_seqs=3, **options) as llm:
        return answer_all(llm, asked), spec_metrics(llm)


@pytest.fixture(scope="module")
def eager(pair: Pair) -> tuple[Any, Any]:
    return drafted(pair)


@pytest.mark.nightly
def test_a_compiled_draft_drafts_the_same_trees(pair: Pair, eager: tuple[Any, Any]) -> None:
    assert drafted(pair, enforce_eager=False) == eager


@pytest.mark.nightly
def test_tokens_of_another_width_are_noticed(
    pair: Pair, eager: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: 64-bit tokens are misread, because vLLM's own pass has 32-bit ones."""
    from vllm_graft.spec_decode.drafters import target_dependent

    class Wide(target_dependent.LevelGrowth):
        def __init__(self, shape: Any, memory: Any, token_dtype: torch.dtype) -> None:
            assert token_dtype == torch.int32
            super().__init__(shape, memory, torch.int64)

    monkeypatch.setattr(target_dependent, "LevelGrowth", Wide)
    answers, metrics = drafted(pair, enforce_eager=False)
    assert answers == eager[0]
    assert metrics.accepted_tokens < eager[1].accepted_tokens

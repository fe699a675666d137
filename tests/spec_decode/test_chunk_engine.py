"""A target with chunked attention: answers are those of vLLM without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.models import table_drafter
from tests.support.models.window_models import BLOCK, write_llama4
from vllm_graft.spec_decode.targets.dense import layer as grafted
from vllm_graft.spec_decode.trees.batch import TreeBatch
from vllm_graft.testing import cpu_engine, greedy, spec_metrics, write_eagle3

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPTS = [[7, 3, 9, 30, 2] * 5, [5] * 60, list(range(1, 92))]
"""Trees cross the ends of chunks, at 32, 64 and 96 tokens."""
TOKENS = 14


def unchunked(**given: Any) -> TreeBatch:
    return TreeBatch(**{**given, "chunked": False, "window": 0})


def test_trees_answer_as_the_target_alone(
    tmp_path: Path, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM's Triton backend, interpreted, computes prompts, by sequences that are chunks."""
    target, draft = write_llama4(tmp_path / "target"), write_eagle3(tmp_path / "draft")
    options: dict[str, Any] = {
        "max_model_len": 256,
        "block_size": BLOCK,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
    }
    with cpu_engine(target, **options) as llm:
        expected = greedy(llm, PROMPTS, TOKENS)
    monkeypatch.setattr(table_drafter, "NEXT", table_drafter.learned(expected))
    plugin(table_drafter)
    options["speculative_config"] = {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": 7,
    }
    tree = {
        "topk": 2,
        "steps": 4,
        "drafter": "table",
        "fallback": "refuse",
    }
    options["additional_config"] = {"graft": {"tree": tree}}
    with cpu_engine(target, attention="triton", **options) as llm:
        assert greedy(llm, PROMPTS, TOKENS) == expected
        metrics = spec_metrics(llm)
        # Negative control: rows of trees that see every key draw other tokens.
        monkeypatch.setattr(grafted, "TreeBatch", unchunked)
        assert greedy(llm, PROMPTS, TOKENS) != expected
    assert metrics.accepted_tokens > metrics.drafts

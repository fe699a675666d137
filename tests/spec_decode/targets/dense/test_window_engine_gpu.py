"""Engines on a device whose targets have windows, chunks, sinks or shared K/V.

All but chunks run in FULL graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.pairs import Request, answer_all, differing
from tests.support.models import table_drafter
from tests.support.models.window_models import (
    BLOCK,
    windowed_pair,
    write_gemma4,
    write_gpt_oss,
    write_llama4,
)
from vllm_graft.spec_decode.targets.dense import layer as grafted
from vllm_graft.spec_decode.trees.batch import TreeBatch
from vllm_graft.testing import greedy, spec_metrics, write_eagle3

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


def test_windows_of_a_trained_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = windowed_pair(tmp_path)
    requests = [
        Request(prompt, {"max_tokens": 48, **kind})
        for prompt in pair.prompts[:8]
        for kind in ({"temperature": 0}, {"seed": 7})
    ]
    with exact_engine(pair.target, block_size=BLOCK) as llm:
        expected = answer_all(llm, requests)
    trees = {"draft": pair.draft, "tree": {"topk": 4, "steps": 4}, "nodes": 15}
    with exact_engine(pair.target, block_size=BLOCK, **trees) as llm:
        assert differing(answer_all(llm, requests), expected) == []
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts / 2
    # Negative control: tree rows that see every key draw other tokens.
    monkeypatch.setattr(grafted, "window_of", lambda impl: 0)
    with exact_engine(pair.target, block_size=BLOCK, **trees) as llm:
        assert differing(answer_all(llm, requests), expected) != []


def unchunked(**given: Any) -> TreeBatch:
    return TreeBatch(**{**given, "chunked": False, "window": 0})


PROMPTS = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 90))]


@pytest.mark.parametrize("write", [write_gpt_oss, write_gemma4, write_llama4])
def test_families_with_trees_of_another_drafter(
    write: Callable[[Path], Path], tmp_path: Path, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts from a table of the target's tokens are accepted far more than a random head's."""
    target, draft = write(tmp_path / "target"), write_eagle3(tmp_path / "draft")
    options = {
        "block_size": BLOCK,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
    }
    with exact_engine(target, **options) as llm:
        expected = greedy(llm, PROMPTS, 40)
    monkeypatch.setattr(table_drafter, "NEXT", table_drafter.learned(expected))
    plugin(table_drafter)
    tree: dict[str, Any] = {"topk": 2, "steps": 4, "drafter": "table", "fallback": "refuse"}
    with exact_engine(target, draft=str(draft), tree=tree, nodes=7, **options) as llm:
        assert greedy(llm, PROMPTS, 40) == expected
        metrics = spec_metrics(llm)
        if write is write_llama4:
            # Negative control: no graph holds these layers, so that rows see every key at once.
            monkeypatch.setattr(grafted, "TreeBatch", unchunked)
            assert greedy(llm, PROMPTS, 40) != expected
    assert metrics.accepted_tokens > metrics.drafts

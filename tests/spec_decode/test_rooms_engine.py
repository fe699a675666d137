"""One new file with one entry adds a drafter or a target family that serves exact answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.pairs import Answer, Pair, Request, answer_all, differing
from tests.support.models import table_drafter, wide_windows
from vllm_graft.testing import cpu_engine, greedy, spec_metrics, write_eagle3, write_llama

pytestmark = pytest.mark.engine


def test_a_drafter_is_one_file_and_one_row(
    pair: Pair,
    samples: list[Request],
    expected: list[Answer],
    plugin: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        table_drafter,
        "NEXT",
        table_drafter.learned(tokens for answer in expected for tokens in answer.tokens),
    )
    plugin(table_drafter)
    with pair.engine(nodes=7, topk=2, steps=4, tree={"drafter": "table"}) as llm:
        assert differing(answer_all(llm, samples), expected) == []
        metrics = spec_metrics(llm)
    # The table has the target's tokens, so far more is accepted than by chance.
    assert metrics.accepted_tokens > metrics.drafts


def test_a_family_is_one_file_and_one_row(tmp_path: Path, plugin: Any) -> None:
    target, draft = write_llama(tmp_path / "target"), write_eagle3(tmp_path / "draft")
    file = target / "config.json"
    config = json.loads(file.read_text())
    kinds = ["sliding_attention", "full_attention"] * config["num_hidden_layers"]
    config |= {
        "sliding_window": 2 * wide_windows.LONGEST,
        "layer_types": kinds[: config["num_hidden_layers"]],
    }
    file.write_text(json.dumps(config))
    prompts = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 90))]
    options: dict[str, Any] = {"max_model_len": wide_windows.LONGEST}
    with cpu_engine(target, **options) as llm:
        expected = greedy(llm, prompts, 12)
    options["speculative_config"] = {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": 7,
    }
    options["additional_config"] = {"graft": {"tree": {"topk": 3, "steps": 3}}}
    plugin(wide_windows)
    wide_windows.WideWindows.attached.clear()
    with cpu_engine(target, **options) as llm:
        assert greedy(llm, prompts, 12) == expected
    windows = kinds[: config["num_hidden_layers"]].count("sliding_attention")
    assert len(wide_windows.WideWindows.attached) == windows

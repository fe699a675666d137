"""Values that a configuration may hold, and how messages show keys and values."""

from pathlib import Path
from typing import Any

import pytest

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import MAX_TEXT, require_plain
from vllm_graft.base.values import below, reason_of, several, shown


@pytest.mark.parametrize(
    "value",
    [None, True, -(2**63) + 1, 0.5, "text", "ünï\n", [1, (2, [])], {"a": {"b": None}}, Path("/x")],
)
def test_what_json_can_say_is_plain(value: object) -> None:
    require_plain(value, "--flag")


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_lists_may_be_nested_sixteen_deep() -> None:
    require_plain(_nested(16), "--flag")
    with pytest.raises(ConfigError, match="nested more than 16 deep"):
        require_plain(_nested(17), "--flag")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="nested more than 16 deep"):
        require_plain(loop, "--flag")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1: 2}, "--flag: the key 1 is refused: a key is a text"),
        ({"a": {None: 1}}, "--flag.a: the key None is refused"),
        ({"a": [0, b"x"]}, "--flag.a[1]: b'x' is refused: a bytes is neither text"),
        ({"a": float("nan")}, "--flag.a: nan is refused: it is no finite number"),
        (-(10**20), "--flag: -100000000000000000000 is refused: it is too large"),
        ([10**5000], "--flag[0]: <int> is refused: it is too large"),
        ("\udc80", r"--flag: '\udc80' is refused: it is no text in Unicode"),
        ({"\udc80": 1}, r"--flag: the key '\udc80' is refused: it is no text in Unicode"),
        ("x" * (MAX_TEXT + 1), f"it has {MAX_TEXT + 1} characters"),
        ({1, 2}, "a set is neither text"),
        ({"a\nb": object}, "--flag.'a\\nb': <class 'object'> is refused"),
    ],
)
def test_the_rest_is_refused_by_its_place(value: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_plain(value, "--flag")
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_thousand_wrong_keys_are_ten_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        require_plain({str(number): b"" for number in range(1000)}, "--flag")
    lines = str(caught.value).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "There are more of them."
    assert several("abc") == "a\nb\nc"


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("boom")


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("boom")


def test_anything_is_shown_in_one_short_line() -> None:
    assert shown("a\nb") == r"'a\nb'"
    assert shown(Unshown()) == "<Unshown>"
    assert len(shown("x" * 10_000)) < 150
    assert below("--flag", "a", 0, "b c", "", "x" * 100).startswith("--flag.a[0].b c.''.'xxx")
    assert reason_of(ValueError("two\n lines")) == "ValueError: two lines"
    assert reason_of(SystemExit()) == "SystemExit"
    assert reason_of(Speechless()) == "Speechless"
    assert len(reason_of(ValueError("x" * 10_000))) < 600

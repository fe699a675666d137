"""What schemas and structural tags force of a text, by hand and against xgrammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.spec_decode.lookup.forced_text import Choice, Item, Piece, pieces_of
from vllm_graft.spec_decode.lookup.schema_text import (
    COMPACT,
    INDENTED,
    MAX_ALTERNATIVES,
    MAX_LITERAL,
    SPACED,
    Style,
    schema_items,
    tag_items,
)

CITY = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "kelvin"]},
        "city": {"type": "string"},
        "days": {"type": "integer"},
    },
    "required": ["unit", "city", "days"],
    "additionalProperties": False,
}


def texts(schema: Any, style: Style = COMPACT, room: int = 10_000) -> list[str]:
    return [piece.text for piece in pieces_of(schema_items(schema, style), room)]


def test_known_texts_and_gaps() -> None:
    assert pieces_of(schema_items(CITY, COMPACT), 999) == [
        # The other alternative, with what stands before and behind it.
        Piece('{"unit":"kelvin","city":"', opens=True),
        Piece('{"unit":"celsius","city":"', opens=True),
        Piece('","days":', opens=False),
        Piece("}", opens=False),
    ]
    assert texts(CITY, SPACED)[1:] == ['{"unit": "celsius", "city": "', '", "days": ', "}"]
    assert texts(CITY, INDENTED)[-2:] == ['",\n  "days": ', "\n}"]


NESTED = {"properties": {"next": {"$ref": "#/$defs/x"}}}
MERGED = {"properties": {"a": {"const": 1}}, "anyOf": [{"properties": {"b": {"const": 2}}}]}
ELSEWHERE = {"properties": {"a": {"$ref": "http://other"}, "b": {"$ref": "#/none"}}}
UNKNOWN = {"properties": {"a": 3, "b": {"type": "unheard"}, "c": True}}
FORMS: list[tuple[Any, list[str]]] = [
    ({"const": {"a": [1, None], "é": '"'}}, ['{"a":[1,null],"é":"\\""}']),
    ({"type": "boolean"}, ["false", "true"]),
    ({"type": ["string", "null"]}, ["null", '"', '"']),
    ({"type": "null"}, ["null"]),
    ({"type": "object", "additionalProperties": False}, ["{}"]),
    ({"type": "object"}, ["{", "}"]),
    ({"type": "array", "items": {"type": "null"}}, ["[null]"]),
    ({"prefixItems": [{"const": 1}, {"type": "number"}]}, ["[1,", "]"]),
    ({"type": "array", "maxItems": 0}, ["[]"]),
    (MERGED, ['{"a":1,"b":2}']),
    ({"oneOf": [{"const": 1}, {"const": 2}]}, ["2", "1"]),
    ({"allOf": [{"const": 1}]}, ["1"]),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": 7}}}, ["7"]),
    # A value within itself, and what can't be read, are gaps.
    ({"$ref": "#/$defs/x", "$defs": {"x": NESTED}}, ['{"next":', "}"]),
    (ELSEWHERE, ['{"a":', ',"b":', "}"]),
    (UNKNOWN, ['{"a":', ',"b":', ',"c":', "}"]),
    *((each, []) for each in ({"anyOf": 3}, {"enum": []}, {"type": []}, {"$ref": 3})),
    *((each, []) for each in ({}, True, None, [])),
    ({"properties": 3}, ["{", "}"]),
    ({"prefixItems": 3}, ["[", "]"]),
    ({"const": "x" * MAX_LITERAL}, []),
]


@pytest.mark.parametrize(("schema", "found"), FORMS)
def test_forms(schema: Any, found: list[str]) -> None:
    assert texts(schema) == found


def test_reading_has_bounds() -> None:
    """Alternatives, values within values, references that multiply, and room."""
    assert len(texts({"enum": list(range(99))})) == MAX_ALTERNATIVES
    deep: Any = {"const": 1}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    assert texts(deep) == ["[" * 16, "]" * 16]
    doubling = {
        f"d{n}": {"properties": {key: {"$ref": f"#/$defs/d{n + 1}"} for key in "abcdefgh"}}
        for n in range(16)
    }
    assert sum(map(len, texts({"$ref": "#/$defs/d0", "$defs": doubling}))) < 20_000
    assert texts(CITY, room=40) == ['{"unit":"kelvin","city":"']
    assert texts(CITY, room=5) == []


def whole(items: list[Item], fill: Iterator[str]) -> str:
    """A text: the first of alternatives, and given texts in gaps."""
    text = ""
    for item in items:
        if isinstance(item, Choice):
            text += whole(list(item.alternatives[0]), fill)
        else:
            text += next(fill) if item is None else item
    return text


@pytest.mark.parametrize("style", [SPACED, COMPACT, INDENTED])
def test_filled_gaps_make_what_fits(style: Style) -> None:
    made = whole(schema_items(CITY, style), iter(["paris", "3"]))
    value = {"unit": "celsius", "city": "paris", "days": 3}
    separators = (style.item, style.key)
    assert made == json.dumps(value, separators=separators, indent=style.indent)
    jsonschema.validate(json.loads(made), CITY)


def test_grammars_permit_each_style() -> None:
    """What is drafted is of use where the grammar that vLLM compiles permits it."""
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo([chr(code) for code in range(256)], vocab_size=256)
    compiler = xgrammar.GrammarCompiler(info)
    for any_whitespace in (True, False):
        grammar = compiler.compile_json_schema(
            json.dumps(CITY),
            any_whitespace=any_whitespace,
            separators=None if any_whitespace else (",", ":"),
        )
        for style in (SPACED, COMPACT, INDENTED):
            made = whole(schema_items(CITY, style), iter(["paris", "3"]))
            matcher = xgrammar.GrammarMatcher(grammar)
            assert matcher.accept_string(made) == (any_whitespace or style is COMPACT)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "properties",
                    "items",
                    "enum",
                    "const",
                    "anyOf",
                    "oneOf",
                    "allOf",
                    "$ref",
                    "$defs",
                    "prefixItems",
                    "a",
                ]
            )
            | st.text(max_size=2),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(schema=VALUES, room=st.integers(0, 300))
@settings(max_examples=150, deadline=None)
def test_nothing_raises(schema: Any, room: int) -> None:
    """Whatever a user sends, a list of pieces comes, no longer than there is room."""
    for read in (schema_items, tag_items):
        pieces = pieces_of(read(schema, COMPACT), room)
        assert sum(len(piece.text) for piece in pieces) <= room
        assert all(piece.text for piece in pieces)


def test_tags_around_json() -> None:
    def call(name: str) -> dict[str, Any]:
        content = {"type": "json_schema", "json_schema": {"properties": {"x": {"type": "string"}}}}
        return {"type": "tag", "begin": f"<call>{name} ", "content": content, "end": "</call>"}

    format_ = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [call("a"), call("b")]}
    tag = {"type": "structural_tag", "format": format_}
    assert [piece.text for piece in pieces_of(tag_items(tag, COMPACT), 999)] == [
        '<call>b {"x":"',
        '"}</call>',
        '<call>a {"x":"',
    ]
    older = {"structures": [{"begin": "<f>", "schema": {"const": 1}, "end": "</f>"}]}
    assert [piece.text for piece in pieces_of(tag_items(older, COMPACT), 999)] == ["<f>1</f>"]
    sequence = [{"type": "const_string", "value": "ok "}, {"type": "regex", "pattern": "a+"}]
    several = {
        "type": "sequence",
        "elements": [*sequence, {"type": "optional", "content": call("c")}],
    }
    found = pieces_of(tag_items({"format": several}, COMPACT), 999)
    assert found[0] == Piece("ok ", opens=True)
    assert found[1].text == '<call>c {"x":"'

"""Schemas force a text, by hand and against xgrammar; references cost the same at any length."""

import json
import pickle
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.spec_decode.config.tree_config import NgramConfig
from vllm_graft.spec_decode.lookup import references as module
from vllm_graft.spec_decode.lookup.ngrams import Ngrams
from vllm_graft.spec_decode.lookup.references import (
    CACHE_BYTES,
    CHARACTERS,
    References,
    styles_of,
)
from vllm_graft.spec_decode.lookup.schema_text import (
    COMPACT,
    INDENTED,
    MAX_ALTERNATIVES,
    MAX_LITERAL,
    MAX_VALUES,
    SPACED,
    Choice,
    Item,
    Piece,
    Style,
    Work,
    pieces_of,
    schema_items,
    tag_items,
)
from vllm_graft.spec_decode.lookup.served_references import carry
from vllm_graft.spec_decode.trees.text_state import KEY, reference_in

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
@settings(max_examples=60, deadline=None)
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


ROOM = 2048
MOST_SECONDS = 0.005


class Words:
    """A tokenizer with a token per three characters, which counts what it reads."""

    is_fast = False

    def __init__(self) -> None:
        self.characters = self.calls = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.characters += len(text)
        self.calls += 1
        return [1] * (-(-len(text) // 3))


def params(prediction: Any = None, **forced: Any) -> Any:
    """Parameters as the engine core has them; vLLM's own check all of a prediction when made."""
    kinds = dict.fromkeys(("json", "grammar", "structural_tag", "choice"))
    structured = SimpleNamespace(**{**kinds, **forced}) if forced else None
    extra = None if prediction is None else {KEY: prediction}
    return SimpleNamespace(structured_outputs=structured, extra_args=extra)


def dumped(schema: Any) -> Any:
    return params(json=json.dumps(schema, separators=(",", ":")))


def long_path() -> Any:
    depth = 900
    nested: Any = {"const": 1}
    for _ in range(depth):
        nested = {"": nested}
    # Each reference has a path of its own.
    names = {f"{n:x}": {"$ref": "#" + "/" * (depth - n)} for n in range(60)}
    return dumped({**nested, "type": "object", "properties": names})


def fan_out() -> Any:
    names = {f"a{n:x}": 0 for n in range(5000)}
    steps = {
        f"d{n}": {"properties": {}, "anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 16} for n in range(4)
    }
    return dumped({"$defs": {**steps, "d4": {"properties": names}}, "$ref": "#/$defs/d0"})


ENUM = {"enum": [f"x{n}" for n in range(16)]}
TAG: Any = {"type": "json_schema", "json_schema": {"type": "boolean"}}
for _ in range(8):
    TAG = {"type": "sequence", "elements": [TAG] * 3}
KINDS: dict[str, Callable[[], Any]] = {
    "fields": lambda: dumped({"properties": {f"field_{n}": {"type": "string"} for n in range(30)}}),
    "booleans": lambda: dumped(
        {"properties": {f"{n:x}": {"type": "boolean"} for n in range(1999)}}
    ),
    "references": lambda: dumped(
        {"$defs": {"e": ENUM}, "properties": {f"{n:x}": {"$ref": "#/$defs/e"} for n in range(990)}}
    ),
    "paths": long_path,
    "alternatives": fan_out,
    "kinds": lambda: dumped({"type": ["object"] * 5000, "properties": {"a": ENUM}}),
    "a schema too long": lambda: params(json='{"const":"' + "B" * 5_000_000 + '"}'),
    "values too long": lambda: params(json={"enum": ["B" * 1000] * 20_000}),
    "tags": lambda: params(structural_tag=json.dumps({"format": TAG})),
    "choices": lambda: params(choice=[f"{n} yes" for n in range(5000)]),
    "text": lambda: params("def f(x): return x\n" * 900_000),
    "spaces": lambda: params(" " * (1 << 24)),
    "tokens": lambda: params([5] * 10_000_000),
    "wrong": lambda: params(["B" * 2_000_000]),
    "nested": lambda: params([[5] * 1_000_000]),
}


def references(tokenizer: Words, room: int = ROOM) -> References:
    styles = styles_of(any_whitespace=True)
    return References(tokenizer, room=room, opening=16, vocab_size=2048, styles=styles)


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_thread_works_little(kind: str) -> None:
    ngrams = Ngrams(NgramConfig(), 2, 64, 2048, torch.device("cpu"), reference=ROOM)
    asked = SimpleNamespace(sampling_params=KINDS[kind](), prompt_token_ids=[7] * 30)
    tokenizer = Words()
    carry(asked, references(tokenizer))
    carried = SimpleNamespace(extra_args=asked.sampling_params.extra_args)
    least = min(_seconds(ngrams, carried) for _ in range(3))
    assert least < MOST_SECONDS
    # Beside the steps no more is read than there is room for, and twice that of a text.
    assert tokenizer.characters <= 2 * CHARACTERS * ROOM
    found = reference_in(asked.sampling_params)
    assert len(found.row) <= ROOM
    assert found.row or found.declines or kind in ("kinds", "paths")


def _seconds(ngrams: Ngrams, carried: Any) -> float:
    """CPU time in which a request is sent to a worker and begins there."""
    begun = time.thread_time()
    sent = pickle.loads(pickle.dumps(carried))
    ngrams.begin(1, SimpleNamespace(sampling_params=sent))
    return time.thread_time() - begun


def test_a_request_as_it_comes_would_take_long() -> None:
    """Negative control: what a request predicts, sent on as it is."""
    ngrams = Ngrams(NgramConfig(), 2, 64, 2048, torch.device("cpu"), reference=ROOM)
    assert _seconds(ngrams, SimpleNamespace(extra_args={KEY: [5] * 10_000_000})) > MOST_SECONDS


@pytest.mark.parametrize("kind", ["booleans", "references", "paths", "alternatives", "kinds"])
def test_a_schema_is_read_within_its_work(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One budget holds for all layouts together, and work beyond it stops at once."""
    spent: list[int] = []
    spend = Work.spend

    def counted(self: Work, amount: int = 1) -> bool:
        spent.append(amount)
        return spend(self, amount)

    monkeypatch.setattr(Work, "spend", counted)
    tokenizer = Words()
    references(tokenizer, 1 << 20).of(KINDS[kind](), [7])
    assert sum(spent) < 2.5 * MAX_VALUES
    assert len(spent) < 1.5 * MAX_VALUES
    assert tokenizer.calls < 3 * MAX_VALUES


def test_a_text_is_read_no_further_than_it_is_of_use() -> None:
    """However large `reference` may be."""
    tokenizer = Words()
    found = references(tokenizer, 1 << 20).of(params("def f(x): return x\n" * 900_000), [7])
    assert len(found.row) == 8192 + 1
    assert found.declines == ("cut",)
    assert tokenizer.characters <= 4 * 8192


def test_tokens_are_kept_within_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHE_BYTES", 10_000)
    tokenizer = Words()
    made = references(tokenizer)

    def calls_for(*numbers: int) -> int:
        before = tokenizer.calls
        for number in numbers:
            made.of(dumped({"const": f"{number}" * 100}), [7])
        return tokenizer.calls - before

    assert calls_for(*range(100)) >= 100
    assert made.cache.currsize <= 10_000
    # What was used last is there, and nothing of a text.
    assert calls_for(99) == 0
    assert calls_for(1) > 0
    assert {len(key) for key in made.cache} == {64}
    # One that is too large for all of it is not kept.
    kept = len(made.cache)
    monkeypatch.setattr(module.Split, "num_bytes", property(lambda split: 20_000))
    assert calls_for(200) > 0
    assert calls_for(200) > 0
    assert len(made.cache) == kept


def test_a_flood_of_schemas_keeps_few_bytes() -> None:
    found = references(Words())
    for number in range(50):
        found.of(params(json='{"type":"boolean","x":"' + f"{number}" * 20_000 + '"}'), [7])
        found.of(params(json='{"x":"' + f"{number}" * 5_000_000 + '"}'), [7])
    assert found.cache.currsize < 50 * 2000 < CACHE_BYTES

"""Rows that requests of the fuzz are made of: fields, structures, predictions, floods."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

Body = dict[str, Any]

FIRST_ID = 5
"""Token ids below it are the tokenizer's special ones."""
VOCAB = 2048

STOPS = [" ", "\n", "(", "):", ".", "e", "self", " = ", "return", "\n\n", "in", "the", "'", "of"]

FIELDS: dict[str, tuple[float, Sequence[Any]]] = {
    "prompt_logprobs": (0.1, [0, 1, 3]),
    "ignore_eos": (0.5, [True]),
    "presence_penalty": (0.08, [-1.0, 0.5, 2.0]),
    "frequency_penalty": (0.08, [-0.5, 0.3, 2.0]),
    "repetition_penalty": (0.08, [0.7, 1.1, 1.8]),
    "priority": (0.2, range(-3, 4)),
    "repetition_detection": (0.04, [{"max_pattern_size": 3, "min_count": 2}]),
    # vLLM refuses these two beside drafts.
    "min_p": (0.01, [0.1]),
    "logit_bias": (0.01, [{"7": 4.0}, {"300": 4.0, "1500": -2.0}]),
    # These say how tokens become text, where a prompt is cut, and who shares its K/V.
    "skip_special_tokens": (0.02, [False]),
    "spaces_between_special_tokens": (0.02, [False]),
    "return_tokens_as_token_ids": (0.02, [True]),
    "add_special_tokens": (0.02, [False, True]),
    "truncate_prompt_tokens": (0.02, [1, 2, 16]),
    "cache_salt": (0.05, ["a", "b", "x" * 2000]),
}
"""Fields of a body: how often each is set, and the values, one of which is drawn."""

LISTS: dict[str, tuple[float, Sequence[Any], int]] = {
    "stop_token_ids": (0.1, range(FIRST_ID, 400), 40),
    "allowed_token_ids": (0.06, range(FIRST_ID, VOCAB), 60),
    "bad_words": (
        0.06,
        ["self", " the", "return", "import", " in", "def", "None", " is", "name", "x"],
        4,
    ),
}
"""Fields that are lists: how often, the values, and how many of them are drawn at most."""

BUDGETS = [0, 1, 3, 9]
"""Values of `thinking_token_budget`."""

_PART = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_RECURSIVE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"enum": ["aa", "bb", "é"]},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_EITHER = {
    "anyOf": [
        {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        {"type": "array", "items": {"$ref": "#/$defs/word"}, "minItems": 1, "maxItems": 3},
    ],
    "$defs": {"word": {"type": ["string", "null"], "maxLength": 4}},
}
_FIELDS = {f"p{i}": {"type": "boolean"} for i in range(40)}
_WIDE = {"type": "object", "properties": _FIELDS, "required": list(_FIELDS)}
_TAG = {"begin": "<f>", "schema": _PART, "end": "</f>"}

TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "find it", "parameters": _PART},
}
TOOL_CHOICE = {"type": "function", "function": {"name": "find"}}


def _formatted(schema: Body) -> Body:
    named = {"name": "part", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


STRUCTURES: dict[str, list[Body]] = {
    "regex": [
        {"structured_outputs": {"regex": "[a-c]{2,6}"}},
        {"structured_outputs": {"regex": "(self|None)(\\.[a-z]+)?"}},
        {"structured_outputs": {"regex": "(x+x+)+y?"}},
    ],
    "choice": [{"structured_outputs": {"choice": ["return", "raise", "self.x", "é"]}}],
    "json": [
        {"structured_outputs": {"json": _PART}},
        {"response_format": {"type": "json_object"}},
        _formatted(_PART),
    ],
    "references": [
        {"structured_outputs": {"json": _RECURSIVE}},
        {"structured_outputs": {"json": _EITHER}},
        {"structured_outputs": {"json": _WIDE}},
        _formatted(_RECURSIVE),
    ],
    "grammar": [{"structured_outputs": {"grammar": 'root ::= "a" root | "b" | " " root'}}],
    "tag": [
        {
            "structured_outputs": {
                "structural_tag": json.dumps({"structures": [_TAG], "triggers": [trigger]})
            }
        }
        # Few answers come to the first trigger, and all to the second.
        for trigger in ("<f", "<")
    ],
}

PREDICTIONS: dict[str, Callable[[random.Random, str], Any]] = {
    "text": lambda numbers, text: text,
    "long text": lambda numbers, text: (text + "\n") * 30,
    "backwards": lambda numbers, text: text[::-1],
    "odd text": lambda numbers, text: "\0\ufffd\U0001f9ff</s><s>" * 40,
    "ids": lambda numbers, text: numbers.choices(range(VOCAB), k=numbers.choice([1, 5, 300, 5000])),
    "empty text": lambda numbers, text: "",
    "no ids": lambda numbers, text: [],
    "wrong id": lambda numbers, text: [5, numbers.choice([-1, VOCAB, 10**30, 1.5, "a"])],
    "number": lambda numbers, text: 7,
    "refused": lambda numbers, text: numbers.choice([{"a": 1}, None, [[1]], [None]]),
}
"""Values of `graft_prediction`, given a text of the corpus; stock vLLM refuses the last."""

MEGA = 2_000_000


def _referring(mark: str) -> Body:
    choices = {"enum": [f"x{i}" for i in range(16)]}
    fields = {f"{mark}_{i:x}": {"$ref": "#/$defs/e"} for i in range(900)}
    return {"json": json.dumps({"$defs": {"e": choices}, "type": "object", "properties": fields})}


FLOODS: dict[str, Callable[[str], Body]] = {
    "predicted text": lambda mark: {"vllm_xargs": {"graft_prediction": mark + "ab c\n" * 400_000}},
    "predicted ids": lambda mark: {
        "vllm_xargs": {"graft_prediction": [*mark.encode(), *[7] * 400_000]}
    },
    "wrong prediction": lambda mark: {
        "vllm_xargs": {"graft_prediction": [5, mark + "\x1b[31m" + "B" * MEGA]}
    },
    "foreign argument": lambda mark: {"vllm_xargs": {"other": mark + "B" * MEGA}},
    "long schema": lambda mark: {
        "structured_outputs": {
            "json": json.dumps({"type": "boolean", "description": mark + "B" * MEGA})
        }
    },
    "many references": lambda mark: {"structured_outputs": _referring(mark)},
}
"""Large parts of requests, each other than the last by its mark: what is kept of them adds up."""

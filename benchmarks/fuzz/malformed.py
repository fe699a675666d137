"""Requests with one fault each: all servers have to refuse them alike."""

from __future__ import annotations

import json
import random
from typing import Any

Body = dict[str, Any]


def malformed(
    numbers: random.Random, path: str, body: Body, max_len: int, vocab: int
) -> tuple[str, str, Body | str]:
    """Spoil a valid request; return the name of the change, the path and the body."""
    name = numbers.choice([*sorted(_changes(max_len, vocab)), "cut", "unknown path", "no prompt"])
    if name == "cut":
        text = json.dumps(body)
        return name, path, text[: numbers.randrange(len(text))]
    if name == "unknown path":
        return name, path + "/none", body
    if name == "no prompt":
        return name, path, {k: v for k, v in body.items() if k not in ("prompt", "messages")}
    change = _changes(max_len, vocab)[name]
    return name, path, {**body, **change}


def _changes(max_len: int, vocab: int) -> dict[str, Body]:
    """Return the changes to a body, by name; some are for one of the two paths only."""
    return {
        "unknown model": {"model": "none"},
        "no model": {"model": 7},
        "negative length": {"max_tokens": -1},
        "length of a text": {"max_tokens": "many"},
        "too long": {"prompt": [9] * (max_len + 1), "messages": _message("a\n" * max_len)},
        "too long answer": {
            "max_tokens": max_len,
            "max_completion_tokens": max_len,
            "prompt": [9, 9],
            "messages": _message("ab"),
        },
        "token out of vocabulary": {"prompt": [vocab + 7], "messages": "none"},
        "token negative": {"prompt": [-1], "messages": [{}]},
        "empty prompt": {"prompt": "", "messages": []},
        "empty ids": {"prompt": [], "messages": [{"role": "user"}]},
        "mixed prompt": {"prompt": ["a", 1], "messages": [{"role": 1, "content": 2}]},
        "temperature": {"temperature": -1},
        "temperature of a text": {"temperature": "hot"},
        "top_p zero": {"temperature": 1, "top_p": 0},
        "top_p large": {"temperature": 1, "top_p": 1.5},
        "top_k": {"temperature": 1, "top_k": -5},
        "n zero": {"n": 0},
        "n greedy": {"n": 2, "temperature": 0},
        "n of a text": {"n": "two"},
        "logprobs negative": {"logprobs": -5, "top_logprobs": -5},
        "logprobs many": {"logprobs": 1000, "top_logprobs": 1000},
        "top_logprobs alone": {"logprobs": False, "top_logprobs": 3},
        "prompt_logprobs streamed": {"prompt_logprobs": 1, "stream": True},
        "prompt_logprobs negative": {"prompt_logprobs": -3},
        "prompt_logprobs many": {"prompt_logprobs": 1000, "stream": False, "stream_options": None},
        "stream options": {"stream": False, "stream_options": {"include_usage": True}},
        "penalty": {"presence_penalty": 3},
        "repetition": {"repetition_penalty": 0},
        "min tokens": {"min_tokens": 5000},
        "min tokens negative": {"min_tokens": -1},
        "stop empty": {"stop": ""},
        "stop number": {"stop": 5},
        "stop ids": {"stop_token_ids": ["a"]},
        "stop ids out of vocabulary": {"stop_token_ids": [vocab + 9]},
        "allowed empty": {"allowed_token_ids": []},
        "allowed out of vocabulary": {"allowed_token_ids": [vocab + 1]},
        "bad word empty": {"bad_words": [""]},
        "bias of no token": {"logit_bias": {"x": 1}},
        "bias out of vocabulary": {"logit_bias": {str(vocab + 3): 1}},
        "seed large": {"seed": 2**70},
        "seed of a text": {"seed": "x"},
        "priority of a text": {"priority": "high"},
        "regex": {"structured_outputs": {"regex": "[a-"}},
        "two structures": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "no structure": {"structured_outputs": {}},
        "choice empty": {"structured_outputs": {"choice": []}},
        "json schema": {"structured_outputs": {"json": "{"}},
        "grammar": {"structured_outputs": {"grammar": "root := ("}},
        "response format": {"response_format": {"type": "poem"}},
        "schema missing": {"response_format": {"type": "json_schema"}},
        "truncated": {"truncate_prompt_tokens": -9},
        "truncated long": {"truncate_prompt_tokens": max_len * 9},
    }


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]

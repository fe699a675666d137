"""A workload as the engines of a pair are sent it."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

from benchmarks.workloads.catalogue import WORKLOADS, requests_of
from vllm_graft.bench.common.closed_loop import Request
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.trees.prompts import request_of

OWN = "pair"
"""The name of the pair's own prompts."""

MIXED = "mixed"
"""The name of edits, greedily, beside the pair's own prompts at temperature 1."""


@dataclass
class Load:
    """Requests of a closed loop, and the answers to replay, in tokens, by their prompts' tokens.

    The answer of a request that the target answers itself is empty.
    """

    requests: list[Request] = field(default_factory=list)
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


def load_of(arguments: argparse.Namespace, name: str, count: int) -> Load:
    """So many requests of a workload, or the pair's own prompts, cut to `--prompt` characters.

    A replayed answer has `--tokens` at most, and no other tokens follow it.

    Raises:
        BenchmarkError: the workload has fewer requests, or one has too many tokens.
    """
    if name == MIXED:
        return _mixed(arguments, count)
    load, tokenizer = Load(), tokenizer_of(arguments)
    if name == OWN:
        for text in json.loads((arguments.pair / "prompts.json").read_text()):
            prompt = tokenizer.encode(text[: arguments.prompt])
            load.answers[tuple(prompt)] = []
            load.requests.append(Request({"prompt_token_ids": prompt}))
        return load
    asked = requests_of(name, count, arguments)
    if len(asked) < count:
        raise BenchmarkError(f"--workload {name} has {len(asked)} requests, {count} are wanted")
    replayed = WORKLOADS[name].replayed and not arguments.own_answers
    for each in asked:
        request = request_of(each.line(), tokenizer)
        prompt = request.prompt["prompt_token_ids"]
        if len(prompt) + arguments.tokens > arguments.max_model_len:
            raise BenchmarkError(
                f"--workload {name}: a prompt has {len(prompt)} tokens, and its answer up to "
                f"{arguments.tokens}: raise --max-model-len, or lower --characters"
            )
        answer = load.answers[tuple(prompt)] = []
        if replayed:
            answer += tokenizer.encode(each.answer, add_special_tokens=False)[: arguments.tokens]
            request = replace(request, max_tokens=len(answer))
        load.requests.append(request)
    return load


def _mixed(arguments: argparse.Namespace, count: int) -> Load:
    """Half of the requests are edits, also in flight: where one ends, one of its kind follows."""
    half, lanes = (count + 1) // 2, max(1, max(arguments.requests_in_flight) // 2)
    edits, own = load_of(arguments, "edits", half), load_of(arguments, OWN, 0)
    load = Load(answers=edits.answers | own.answers)
    for place, (edit, chat) in enumerate(zip(edits.requests, cycle(own.requests))):
        lane = place % lanes
        load.requests.append(replace(edit, session=f"edit {lane}", temperature=0.0))
        load.requests.append(replace(chat, session=f"chat {lane}", temperature=1.0))
    return load


def tokenizer_of(arguments: argparse.Namespace) -> Any:
    """The tokenizer of a pair's target."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(arguments.pair / "target"))

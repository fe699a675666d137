"""The target's own answers, at several temperatures, to the questions of conversations."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.real_pair.conversations import Conversation, messages, tokens_of
from benchmarks.real_pair.texts import Text, Turn
from vllm_graft import testing

TEMPERATURES = (0.0, 0.6, 1.0)
AT_A_TIME, PART = 1024, 4096
"""Requests in flight on a GPU, and requests between two looks at the clock."""

ENGINE: dict[str, Any] = {
    "max_num_seqs": AT_A_TIME,
    "max_model_len": 1024,
    # Nothing is measured, so that something else may take and free memory meanwhile.
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 16 << 30,
    "generation_config": "vllm",
    # A small model's steps are launches, which graphs save; compiling takes a minute.
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 8, 32, 64, *range(128, AT_A_TIME + 1, 128)],
    },
}
"""Options of an engine that starts soon and answers many requests at a time."""

CPU_ENGINE: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_model_len": ENGINE["max_model_len"],
    "kv_cache_memory_bytes": 1 << 30,
    "generation_config": "vllm",
}


def questions(
    conversations: Sequence[Conversation], tokenizer: Any, longest: int
) -> list[list[int]]:
    """Token ids of each first question that has at most `longest` of them."""
    found = [tokens_of(tokenizer, messages(each)[:1]) for each in conversations]
    return [tokens for tokens in found if len(tokens) <= longest]


def turns_of(asked: Sequence[list[int]], temperatures: Sequence[float]) -> list[Turn]:
    """Each question at one temperature, then, after all others had their turn, at the next."""
    return [
        (tokens, temperatures[(place + turn) % len(temperatures)])
        for turn in range(len(temperatures))
        for place, tokens in enumerate(asked)
    ]


def answer(
    llm: Any,
    turns: Sequence[Turn],
    *,
    at_a_time: int,
    seconds: float,
    max_tokens: int,
    held_out: bool,
) -> list[Text]:
    """Ask an engine each question at its temperature; no part begins after `seconds`."""
    from vllm import SamplingParams

    began, found, emitted = time.perf_counter(), list[Text](), 0
    for start in range(0, len(turns), at_a_time):
        if time.perf_counter() - began > seconds:
            break
        part = turns[start : start + at_a_time]
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=max_tokens, seed=seed, detokenize=False
            )
            for seed, (_, temperature) in enumerate(part, start)
        ]
        prompts = [{"prompt_token_ids": tokens} for tokens, _ in part]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for (prompt, temperature), output in zip(part, outputs, strict=True):
            drawn = output.outputs[0].token_ids
            text = torch.tensor([*prompt, *drawn], dtype=torch.int32)
            found.append(Text(text, len(prompt), temperature, held_out))
            emitted += len(drawn)
        passed = time.perf_counter() - began
        print(f"{passed:5.0f} s: {len(found)} answers, {emitted} tokens", flush=True)
    return found


def written_texts(conversations: Sequence[Conversation], tokenizer: Any) -> list[Text]:
    """Whole conversations as they were written, to train on beside the target's own answers."""
    found = []
    for conversation in conversations:
        turns = messages(conversation)
        prompt = len(tokens_of(tokenizer, turns[:1]))
        tokens = tokens_of(tokenizer, turns, answer_follows=False)
        found.append(Text(torch.tensor(tokens, dtype=torch.int32), prompt))
    return found


def run(
    target: Path,
    train: Sequence[Conversation],
    held_out: Sequence[Conversation],
    *,
    seconds: float,
    max_tokens: int,
    longest: int,
    held_out_seconds: float,
    part: tuple[int, int] = (0, 1),
) -> list[Text]:
    """Have the target answer both kinds of conversations, in an engine.

    With `part` ``(i, n)``, each n-th question is asked from the i-th on, and only the first part
    has the held-out ones, so that n GPUs share the work.
    """
    # Asking whether there is a GPU starts CUDA, and an engine can't be a fork of that.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if not torch.cuda.is_available():
        # Before transformers, which may import Triton.
        testing.install()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(target))
    shown = turns_of(questions(held_out, tokenizer, longest), (0.0, 1.0))
    place, parts = part
    asked = questions(train[place::parts], tokenizer, longest)
    learned = turns_of(asked, TEMPERATURES)
    with _answering(target) as ask:
        found: list[Text] = []
        if not place:
            found += ask(shown, seconds=held_out_seconds, max_tokens=max_tokens, held_out=True)
        found += ask(learned, seconds=seconds, max_tokens=max_tokens, held_out=False)
    return found


@contextlib.contextmanager
def _answering(target: Path) -> Iterator[Any]:
    if torch.cuda.is_available():
        with testing.running(target, **ENGINE) as llm:
            yield functools.partial(answer, llm, at_a_time=PART)
    else:
        with testing.cpu_engine(target, **CPU_ENGINE) as llm:
            yield functools.partial(answer, llm, at_a_time=CPU_ENGINE["max_num_seqs"])

"""The target's own answers, at several temperatures, to the questions of conversations."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.real_pair.conversations import Conversation, messages, tokens_of
from benchmarks.real_pair.texts import Text

TEMPERATURES = (0.0, 0.6, 1.0)
AT_A_TIME, PART = 1024, 4096
"""Requests in flight, and requests between two looks at the clock."""


def engine_options(cuda: bool) -> dict[str, Any]:
    """Options of an engine that starts soon and answers many requests at a time."""
    options: dict[str, Any] = {"max_num_seqs": AT_A_TIME if cuda else 4, "max_model_len": 1024}
    if cuda:
        sizes = [1, 8, 32, 64, *range(128, AT_A_TIME + 1, 128)]
        options |= {
            # Nothing is measured, so that something else may take and free memory meanwhile.
            "gpu_memory_utilization": 0.2,
            "kv_cache_memory_bytes": 16 << 30,
            "generation_config": "vllm",
            # A small model's steps are launches, which graphs save; compiling takes a minute.
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sizes,
            },
        }
    return options


def questions(
    conversations: Sequence[Conversation], tokenizer: Any, longest: int
) -> list[list[int]]:
    """Token ids of each first question that has at most `longest` of them."""
    found = [tokens_of(tokenizer, messages(each)[:1]) for each in conversations]
    return [tokens for tokens in found if len(tokens) <= longest]


def answer(
    llm: Any,
    asked: Sequence[list[int]],
    *,
    seconds: float,
    max_tokens: int,
    held_out: bool,
    temperatures: Sequence[float] = TEMPERATURES,
) -> list[Text]:
    """Ask an engine each question at each temperature, until `seconds` are over.

    A question comes at one temperature, then at the next, after all others had their turn.
    """
    from vllm import SamplingParams

    began = time.perf_counter()
    turns = [
        (tokens, temperatures[(place + turn) % len(temperatures)])
        for turn in range(len(temperatures))
        for place, tokens in enumerate(asked)
    ]
    found: list[Text] = []
    emitted = 0
    for start in range(0, len(turns), PART):
        if time.perf_counter() - began > seconds:
            break
        part = turns[start : start + PART]
        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=max_tokens,
                seed=start + place,
                detokenize=False,
            )
            for place, (_, temperature) in enumerate(part)
        ]
        prompts = [{"prompt_token_ids": tokens} for tokens, _ in part]
        for (tokens, temperature), output in zip(
            part, llm.generate(prompts, params, use_tqdm=False), strict=True
        ):
            drawn = list(output.outputs[0].token_ids)
            emitted += len(drawn)
            text = torch.tensor([*tokens, *drawn], dtype=torch.int32)
            found.append(Text(text, len(tokens), temperature, held_out))
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
) -> list[Text]:
    """Start an engine of the target and have it answer both kinds of conversations."""
    # Asking whether there is a GPU starts CUDA, and an engine can't be a fork of that.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    from transformers import AutoTokenizer

    from vllm_graft import testing

    tokenizer = AutoTokenizer.from_pretrained(str(target))
    cuda = torch.cuda.is_available()
    start = testing.running if cuda else testing.cpu_engine
    with start(target, **engine_options(cuda)) as llm:
        found = answer(
            llm,
            questions(held_out, tokenizer, longest),
            seconds=held_out_seconds,
            max_tokens=max_tokens,
            held_out=True,
            temperatures=(0.0, 1.0),
        )
        return found + answer(
            llm,
            questions(train, tokenizer, longest),
            seconds=seconds,
            max_tokens=max_tokens,
            held_out=False,
        )

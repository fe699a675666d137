"""The target's own answers, at several temperatures, to the questions of conversations."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.real_pair.conversations import Conversation, messages, tokens_of
from benchmarks.real_pair.texts import Text, Turn, collect

TEMPERATURES = (0.0, 0.6, 1.0)
ROWS = 16
"""Answers that grow at the same time without an engine."""

AT_A_TIME, PART = 1024, 4096
"""Requests in flight, and requests between two looks at the clock."""

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
    seconds: float,
    max_tokens: int,
    held_out: bool,
) -> list[Text]:
    """Ask an engine each question at its temperature, until `seconds` are over."""
    from vllm import SamplingParams

    def ask(start: int, part: Sequence[Turn]) -> list[list[int]]:
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
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return collect(turns, PART, ask, seconds=seconds, held_out=held_out)


def draw(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token ``[rows]`` from each row of `logits` ``[rows, tokens]``; the best at 0."""
    warm = temperatures.clamp(min=1e-3)[:, None]
    drawn = torch.multinomial((logits / warm).softmax(-1), 1, generator=generator).squeeze(1)
    return torch.where(temperatures > 0, drawn, logits.argmax(-1))


@torch.no_grad()
def grown(
    model: Any,
    asked: Sequence[list[int]],
    temperatures: Sequence[float],
    max_tokens: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """Continue prompts side by side, each up to `max_tokens` or the token that ends a text.

    `generator` is of the model's device.
    """
    width = max(map(len, asked))
    tokens = torch.zeros(len(asked), width, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(asked):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    tokens, mask = tokens.to(generator.device), mask.to(generator.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    warmth = torch.tensor(temperatures, dtype=torch.float32, device=generator.device)
    ends = torch.tensor(model.config.eos_token_id, device=generator.device)
    ended = torch.zeros(len(asked), dtype=torch.bool, device=generator.device)
    drawn: list[Tensor] = []
    cache: Any = None
    while len(drawn) < max_tokens and not ended.all():
        found = model(
            tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = found.past_key_values
        drawn.append(draw(found.logits[:, -1].float(), warmth, generator))
        ended |= torch.isin(drawn[-1], ends)
        tokens, positions = drawn[-1][:, None], positions[:, -1:] + 1
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)
    rows = torch.stack(drawn, 1).tolist() if drawn else [[] for _ in asked]
    return [_up_to_the_end(row, model.config.eos_token_id) for row in rows]


def _up_to_the_end(row: list[int], ends: int | list[int]) -> list[int]:
    stops = {ends} if isinstance(ends, int) else set(ends)
    for place, token in enumerate(row):
        if token in stops:
            return row[: place + 1]
    return row


def generate(
    model: Any,
    turns: Sequence[Turn],
    *,
    seconds: float,
    max_tokens: int,
    held_out: bool,
    seed: int = 0,
    rows: int = ROWS,
) -> list[Text]:
    """Continue each prompt at its temperature, `rows` together, until `seconds` are over."""
    generator = torch.Generator(model.device).manual_seed(seed)

    def continued(_: int, part: Sequence[Turn]) -> list[list[int]]:
        asked, temperatures = zip(*part, strict=True)
        found: list[list[int]] = grown(model, asked, temperatures, max_tokens, generator)
        return found

    return collect(turns, rows, continued, seconds=seconds, held_out=held_out)


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
    """Have the target answer both kinds of conversations, in an engine if there is a GPU.

    With `part` ``(i, n)``, each n-th question is asked from the i-th on, and only the first part
    has the held-out ones, so that n GPUs share the work.
    """
    # Asking whether there is a GPU starts CUDA, and an engine can't be a fork of that.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
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
        from vllm_graft import testing

        with testing.running(target, **ENGINE) as llm:
            yield functools.partial(answer, llm)
        return
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(target), dtype=torch.float32)
    yield functools.partial(generate, model.eval())

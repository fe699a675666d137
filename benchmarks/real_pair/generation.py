"""A target's answers by transformers, for a CPU: vLLM's sampler is interpreted there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.real_pair.texts import Text, Turn, collect

ROWS = 16
"""Answers that grow at the same time, unless a number is given."""


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

"""Texts to train on: a prompt and its continuation each, and batches of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Turn = tuple[list[int], float]
"""The token ids of a prompt, and the temperature that it is answered at."""


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and what follows.

    Attributes:
        tokens: int32 ``[length]``.
        prompt: how many of them are the prompt.
        temperature: at which the target drew the rest; -1 where somebody else wrote it.
        held_out: whether it is for measuring alone.
    """

    tokens: Tensor
    prompt: int
    temperature: float = -1.0
    held_out: bool = False


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded at their ends.

    Attributes:
        tokens: int64 ``[texts, length]``.
        counted: bool ``[texts, length - 2]``; whether the token two places after is of an answer.
    """

    tokens: Tensor
    counted: Tensor


def write_texts(texts: Sequence[Text], file: Path) -> None:
    """Write texts to a file of safetensors."""
    held_out = [float(text.held_out) for text in texts]
    save_file(
        {
            "tokens": torch.cat([text.tokens.to(torch.int32) for text in texts]),
            "lengths": torch.tensor([len(text.tokens) for text in texts]),
            "prompts": torch.tensor([text.prompt for text in texts]),
            "temperatures": torch.tensor([text.temperature for text in texts]),
            "held_out": torch.tensor(held_out),
        },
        file,
    )


def read_texts(file: Path) -> list[Text]:
    """Read what `write_texts` wrote."""
    found = load_file(file)
    parts = found["tokens"].split(found["lengths"].tolist())
    rows = zip(
        parts,
        found["prompts"].tolist(),
        found["temperatures"].tolist(),
        found["held_out"].tolist(),
        strict=True,
    )
    return [
        Text(tokens, prompt, round(temperature, 3), bool(held_out))
        for tokens, prompt, temperature, held_out in rows
    ]


def batches(
    texts: Sequence[Text], tokens: int, longest: int, passes: int, seed: int
) -> Iterator[Batch]:
    """Batches of up to `tokens` tokens with padding, in random order; like lengths share one.

    Texts are cut to `longest` tokens. What comes within the first `passes` tokens is not counted.
    """
    order = random.Random(seed)
    shuffled = list(texts)
    order.shuffle(shuffled)
    # The lengths are sorted within parts, so that a batch isn't the same in each round.
    part = max(1, 32 * tokens // longest)
    groups: list[list[Text]] = []
    for start in range(0, len(shuffled), part):
        group: list[Text] = []
        for text in sorted(shuffled[start : start + part], key=lambda text: len(text.tokens)):
            if group and (len(group) + 1) * min(longest, len(text.tokens)) > tokens:
                groups.append(group)
                group = []
            group.append(text)
        groups.append(group)
    order.shuffle(groups)
    for group in groups:
        batch = padded(group, longest, passes)
        if batch.counted.any():
            yield batch


def padded(texts: Sequence[Text], longest: int, passes: int) -> Batch:
    """Put texts side by side."""
    width = max(3, min(longest, max(len(text.tokens) for text in texts)))
    tokens = torch.zeros(len(texts), width, dtype=torch.int64)
    counted = torch.zeros(len(texts), width - 2, dtype=torch.bool)
    for row, text in enumerate(texts):
        length = min(longest, len(text.tokens))
        tokens[row, :length] = text.tokens[:length]
        counted[row, max(text.prompt - 2, passes - 1) : max(0, length - 2)] = True
    return Batch(tokens, counted)

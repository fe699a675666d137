"""Texts of Python sources: what a machine without a network has to train on."""

from __future__ import annotations

import random
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.real_pair.texts import Text, Turn

HELD_OUT = 20
"""One file in so many is for measuring alone."""

PROMPT = (24, 144)
"""Shortest and longest prompt, in tokens. One of 400 characters has 85 to 147."""

LEAST_FILE = 300
"""Characters of the smallest file that is read."""


def standard_library() -> list[Path]:
    """The modules of the Python that runs this, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "site-packages", "dist-packages", "idle_test", "lib2to3"}
    found = sorted(root.rglob("*.py"))
    return [file for file in found if not skipped & set(file.relative_to(root).parts)]


def is_held_out(file: Path) -> bool:
    """Whether a file is for measuring alone, which its name and its folder's decide."""
    return zlib.crc32(f"{file.parent.name}/{file.name}".encode()) % HELD_OUT == 0


def tokenized(files: Sequence[Path], tokenizer: Any) -> Iterator[tuple[bool, list[int]]]:
    """Whether each file is held out, and its tokens; files that are no UTF-8 are left out."""
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) >= LEAST_FILE:
            yield is_held_out(file), tokenizer(text)["input_ids"]


def written_texts(found: Sequence[tuple[bool, list[int]]], length: int) -> list[Text]:
    """Whole files in pieces of `length` tokens; a piece's first token is its prompt."""
    return [
        Text(torch.tensor(tokens[start : start + length], dtype=torch.int32), 1, held_out=held_out)
        for held_out, tokens in found
        for start in range(0, len(tokens) - 16, length)
    ]


def turns(
    found: Sequence[tuple[bool, list[int]]],
    temperatures: Sequence[float],
    count: int,
    held_out: bool,
    seed: int = 0,
) -> list[Turn]:
    """Beginnings of `count` random places, which temperatures take in turn.

    Longer files have more of the places.
    """
    order = random.Random(seed)
    chosen = [tokens for held, tokens in found if held is held_out and len(tokens) > PROMPT[0]]
    weights = [len(tokens) for tokens in chosen]
    asked = []
    for tokens in order.choices(chosen, weights, k=count):
        length = min(len(tokens), order.randint(*PROMPT))
        start = order.randrange(len(tokens) - length + 1)
        asked.append(tokens[start : start + length])
    return [(tokens, temperatures[place % len(temperatures)]) for place, tokens in enumerate(asked)]

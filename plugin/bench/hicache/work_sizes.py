"""How much work the parts of the benchmark do; each size is a flag of its name."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any


def _size(default: float, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Sizes:
    """The amount of work, with the help of each flag."""

    vocab: int = _size(8000, "prompts are random token ids in [16, vocab)")
    block: int = _size(16, "tokens of a block of the device's K/V cache")
    gpu_tokens: int = _size(28_672, "tokens that the K/V cache of the device holds")
    host_gib: float = _size(16.0, "GiB of the host cache, ours and vLLM's")
    suffix: int = _size(512, "new tokens behind a prefix that the host has")
    requests: int = _size(32, "requests that decode at a time")
    prompt: int = _size(512, "tokens of their prompts")
    tokens: int = _size(256, "tokens of their answers")
    sessions: int = _size(64, "sessions at a time, with more K/V than the device holds")
    turns: int = _size(4, "turns of a session")
    turn_tokens: int = _size(384, "tokens of the user per turn")
    reply: int = _size(64, "tokens of an answer in a session")
    seconds: float = _size(60.0, "longest time of a round of sessions")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each size."""
    for each in fields(Sizes):
        flag, text = "--" + each.name.replace("_", "-"), each.metadata["help"]
        parser.add_argument(flag, type=type(each.default), default=each.default, help=text)


def read_sizes(arguments: argparse.Namespace) -> Sizes:
    """The sizes that the arguments ask for."""
    return Sizes(**{each.name: getattr(arguments, each.name) for each in fields(Sizes)})

"""How much work the parts of the benchmark do; each size is a flag of its name."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

HELP = {
    "vocab": "prompts are random token ids in [16, vocab)",
    "block": "tokens of a block of the device's K/V cache",
    "gpu_tokens": "tokens that the K/V cache of the device holds",
    "host_gib": "GiB of the host cache, ours and vLLM's",
    "suffix": "new tokens behind a prefix that the host has",
    "requests": "requests that decode at a time",
    "prompt": "tokens of their prompts",
    "tokens": "tokens of their answers",
    "sessions": "sessions at a time, with more K/V than the device holds",
    "turns": "turns of a session",
    "turn_tokens": "tokens of the user per turn",
    "reply": "tokens of an answer in a session",
    "seconds": "longest time of a round of sessions",
}


@dataclass(frozen=True)
class Sizes:
    """The amount of work; lengths are in tokens."""

    vocab: int = 8000
    block: int = 16
    gpu_tokens: int = 28_672
    host_gib: float = 16.0
    suffix: int = 512
    requests: int = 32
    prompt: int = 512
    tokens: int = 256
    sessions: int = 64
    turns: int = 4
    turn_tokens: int = 384
    reply: int = 64
    seconds: float = 60.0

    @property
    def session_tokens(self) -> int:
        """Tokens of all sessions at their end."""
        return self.sessions * self.turns * (self.turn_tokens + self.reply)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each size."""
    for each in fields(Sizes):
        flag, kind = "--" + each.name.replace("_", "-"), type(each.default)
        parser.add_argument(flag, type=kind, default=each.default, help=HELP[each.name])


def read_sizes(arguments: argparse.Namespace) -> Sizes:
    """The sizes that the arguments ask for."""
    return Sizes(**{each.name: getattr(arguments, each.name) for each in fields(Sizes)})

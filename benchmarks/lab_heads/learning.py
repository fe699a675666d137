"""How a drafter is trained, by the clock, and how often what it drafts would be accepted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.descent import descend
from benchmarks.lab_heads.target_states import Read, Target, groups, side_by_side
from benchmarks.real_pair.texts import Text


class Lesson(Protocol):
    """A drafter, and what it is taught with."""

    drafter: nn.Module

    def begin(self, given: Sequence[Read]) -> None:
        """Give the drafter weights to begin with."""

    def loss(self, read: Read) -> Tensor:
        """What is to become small."""

    def drafted(self, read: Read) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits of each depth and the target's probabilities, ``[chains, vocab]`` each."""


@dataclass(frozen=True)
class Run:
    """Settings of a training run, which lasts `seconds` or `steps`, whatever ends first."""

    device: torch.device
    seconds: float
    steps: int = 10**9
    rate: float = 1e-3
    warm_up: float = 0.03
    seed: int = 0


def learn(lesson: Lesson, given: Iterator[Read], run: Run) -> list[float]:
    """Train a drafter; return the loss of each step."""
    return descend(lesson.drafter, given, lesson.loss, run)


@dataclass(frozen=True)
class Acceptance:
    """How a drafter does by depth, on texts that it has not seen; depth 1 is the first draft.

    Attributes:
        agree: share of the target's likeliest tokens that are the draft's too, where all earlier
            drafts of the chain agreed.
        overlap: mean of sum(min(p, q)) over chains, which is how often a sampled draft is
            accepted behind the text itself.
        length: mean acceptance length of a greedy chain over all depths, with the bonus token.
        chains: chains that were looked at.
    """

    agree: list[float]
    overlap: list[float]
    length: float
    chains: int


@torch.no_grad()
def acceptance(
    lesson: Lesson, target: Target, texts: Sequence[Text], tokens: int, longest: int
) -> Acceptance:
    """Compare a drafter with the target on texts of which each token was the target's own."""
    torch.manual_seed(0)
    order = torch.Generator().manual_seed(0)
    same, asked, shared, chains = list[float](), list[float](), list[float](), 0
    for group in groups(texts, tokens, longest, order):
        read = target.read(*side_by_side(group, longest))
        live: Tensor | None = None
        for number, (logits, wanted) in enumerate(lesson.drafted(read)):
            if number == len(same):
                for each in (same, asked, shared):
                    each.append(0.0)
            live = (
                torch.ones(len(logits), dtype=torch.bool, device=logits.device)
                if (live is None)
                else live
            )
            asked[number] += live.sum().item()
            live = live & (logits.argmax(-1) == wanted.argmax(-1))
            same[number] += live.sum().item()
            shared[number] += torch.minimum(logits.softmax(-1), wanted).sum().item()
        chains += 0 if live is None else len(live)
    agreed = [part / max(1.0, whole) for part, whole in zip(same, asked, strict=True)]
    length = 1 + sum(math.prod(agreed[: depth + 1]) for depth in range(len(agreed)))
    return Acceptance(
        [round(each, 4) for each in agreed],
        [round(each / max(1, chains), 4) for each in shared],
        round(length, 3),
        chains,
    )


def beginning(given: Iterator[Read], count: int) -> tuple[list[Read], Iterator[Read]]:
    """The first `count` reads, and all of them."""
    found = list(islice(given, count))
    return found, chain(found, given)

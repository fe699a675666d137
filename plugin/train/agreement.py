"""How often a head's drafts are accepted, estimated on texts that it has not seen."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_graft.train.draft_head import Head
from vllm_graft.train.lessons import Lesson


@dataclass(frozen=True)
class Agreement:
    """How a head does by depth; depth 1 is the first draft.

    Attributes:
        agree: share of the target's likeliest tokens that are the draft's too, where all earlier
            drafts of the chain agreed.
        overlap: mean of sum(min(p, q)) over places, which is how often a sampled draft is accepted.
        length: mean acceptance length of a greedy chain over all depths, with the bonus token.
        rows: places that were looked at.
    """

    agree: list[float]
    overlap: list[float]
    length: float
    rows: int


@torch.no_grad()
def agreement(head: Head, lessons: Iterable[Lesson], passes: int) -> Agreement:
    """Compare a head with its target on texts of which each token was the target's own."""
    same, asked, shared = ([0.0] * passes for _ in range(3))
    rows = 0
    for lesson in lessons:
        rows += len(lesson.best)
        # Whether the draft agreed so far, for a chain that began so many places earlier.
        before = torch.ones_like(lesson.rows)
        on_gpu = lesson.aux.device.type == "cuda"
        with torch.autocast(lesson.aux.device.type, torch.bfloat16, enabled=on_gpu):
            for number, states in enumerate(head(lesson.aux, lesson.embeds, passes)):
                logits = head.logits(states[lesson.rows]).float()
                agree = logits.argmax(-1) == lesson.best
                live = before[lesson.rows]
                same[number] += (agree & live).sum().item()
                asked[number] += live.sum().item()
                drawn = torch.minimum(logits.softmax(-1), lesson.wanted.float())
                shared[number] += drawn.sum().item()
                held = torch.zeros_like(before)
                held[lesson.rows] = agree & live
                before = F.pad(held[:, :-1], (1, 0))
    agreed = [part / max(1.0, whole) for part, whole in zip(same, asked, strict=True)]
    length = 1 + sum(math.prod(agreed[: depth + 1]) for depth in range(passes))
    return Agreement(
        [round(each, 4) for each in agreed],
        [round(each / max(1, rows), 4) for each in shared],
        round(length, 3),
        rows,
    )

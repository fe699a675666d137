"""How each kind of head is begun, what teaches and judges it, and where it is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.real_pair import training
from benchmarks.real_pair.descent import Run
from benchmarks.real_pair.feature_head import (
    FeatureHead,
    LeastSquares,
    Scales,
    save_feature_head,
)
from benchmarks.real_pair.head import Head, HeadSizes, save_head
from benchmarks.real_pair.targets import Target
from benchmarks.real_pair.texts import Text
from benchmarks.real_pair.training import Teacher

BEGINNING = 16
"""Batches that a head begins by."""

JUDGED = 2**26
"""Most probabilities of one batch at a time while a head of all tokens is measured."""


class Made(Protocol):
    """A head before its training, with its teacher."""

    teacher: Teacher

    @property
    def head(self) -> training.AnyHead:
        """What is trained."""

    def train(self, texts: Sequence[Text], run: Run) -> list[float]:
        """Train the head; return the loss of each step."""

    def save(self, work: Path) -> None:
        """Write the head where engines look for it."""

    def judge(self, run: Run) -> tuple[Teacher, Run]:
        """A teacher that knows all that the served head can draft, and batches for it."""


@dataclass
class Eagle3:
    """A head with a vocabulary and an output layer of its own."""

    head: Head
    teacher: Teacher

    @classmethod
    def of(cls, config: dict[str, Any], model: PreTrainedModel, ids: Tensor) -> Eagle3:
        sizes = HeadSizes.of(config, len(ids))
        head = Head(sizes).to(model.device)
        training.begin_like_the_target(head, model, ids)
        return cls(head, Teacher(model, ids, sizes.aux))

    def train(self, texts: Sequence[Text], run: Run) -> list[float]:
        return training.train(self.head, self.teacher, texts, run)

    def save(self, work: Path) -> None:
        save_head(self.head, self.teacher.ids, work / "eagle3")

    def judge(self, run: Run) -> tuple[Teacher, Run]:
        return self.teacher, run


@dataclass
class Eagle:
    """A head that has the target's output layer: it drafts all tokens and learns from some."""

    head: FeatureHead
    teacher: Teacher

    @classmethod
    def of(cls, config: dict[str, Any], model: PreTrainedModel, ids: Tensor) -> Eagle:
        ids = with_others(ids, config["vocab_size"])
        teacher = Teacher(model, ids, (), whole=False)
        # All that is wanted of the states is their size, so any texts do.
        some = torch.randint(config["vocab_size"], (1, 64), device=model.device)
        with torch.no_grad():
            states = model.base_model(some, use_cache=False).last_hidden_state
        outputs = teacher.outputs[teacher.ids]
        scales = Scales.of(states, teacher.embedding)
        head = FeatureHead(HeadSizes.of(config, len(ids)), outputs, scales).to(model.device)
        return cls(head, teacher)

    def train(self, texts: Sequence[Text], run: Run) -> list[float]:
        """Begin by least squares, which need a few texts alone; the layer learns the rest."""
        given = training.lessons(self.teacher, texts, run)
        first = list(islice(given, BEGINNING))
        sums = LeastSquares(self.head.sizes.hidden, self.head.scales)
        for lesson in first:
            sums.add(lesson.aux[lesson.rows], lesson.embeds[lesson.rows], lesson.states)
        self.head.begin(sums.solve().to(run.device))
        return training.learn(self.head, chain(first, given), run)

    def save(self, work: Path) -> None:
        save_feature_head(self.head, work / "eagle")

    def judge(self, run: Run) -> tuple[Teacher, Run]:
        model, vocab = self.teacher.model, len(self.teacher.outputs)
        self.head.outputs = self.teacher.outputs.float()
        tokens = min(run.tokens, max(1, JUDGED // vocab))
        return Teacher(model, torch.arange(vocab), ()), replace(run, tokens=tokens)


def with_others(ids: Tensor, vocab: int) -> Tensor:
    """Frequent tokens and half as many others, so that a head learns to leave these out."""
    others = torch.ones(vocab, dtype=torch.bool)
    others[ids] = False
    found = others.nonzero().squeeze(1)
    random = torch.Generator().manual_seed(0)
    chosen = found[torch.randperm(len(found), generator=random)[: len(ids) // 2]]
    return torch.cat((ids, chosen)).sort().values


def maker(target: Target) -> Callable[[dict[str, Any], PreTrainedModel, Tensor], Made]:
    """What begins the kind of head that suits a target."""
    makers: dict[str, Callable[..., Made]] = {"eagle3": Eagle3.of, "eagle": Eagle.of}
    return makers[target.head]

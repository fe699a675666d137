"""A made-up target and draft of four tokens, whose next token depends on the last two."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.acceptance_rules.growth import Chance, Grown, grow
from benchmarks.acceptance_rules.verification import Rule, Tree
from vllm_graft.spec_decode.trees.shape import TreeShape

VOCAB = 4


def _table(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)).softmax(-1)


TARGET, DRAFT = _table(1), _table(2)
"""``[token before last, last token, next token]``."""


class MadeUp:
    """The draft after a text that ends with two tokens of number 0."""

    def __init__(self, requests: int) -> None:
        self.last = torch.zeros(requests, 1, 2, dtype=torch.int64)

    def first(self) -> Tensor:
        return DRAFT[0, 0].expand(len(self.last), -1)

    def after(self, node: int, parents: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
        before = self.last[torch.arange(len(parents)), parents, 1]
        self.last = torch.cat((self.last, torch.stack((before, tokens), 1)[:, None]), 1)
        return DRAFT[before, tokens]


def trees(shape: TreeShape, requests: int) -> tuple[list[Tree], Grown]:
    """Trees of so many requests, all after the same text."""
    torch.manual_seed(5)
    draft = MadeUp(requests)
    grown = grow(draft, shape, Chance(0.8, 0.3))
    target = TARGET[draft.last[..., 0], draft.last[..., 1]].double().numpy()
    laws = grown.draft.double().numpy()
    return [
        Tree(parents, tokens, target[number], laws[number])
        for number, (parents, tokens) in enumerate(
            zip(grown.parents.tolist(), grown.tokens.tolist(), strict=True)
        )
    ], grown


def emitted(
    rule: Rule, shape: TreeShape, requests: int, length: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], float]:
    """Count the texts of `length` tokens that a rule emits; and its mean of accepted nodes.

    What a step emits too little of is drawn from the target.
    """
    random = np.random.default_rng(3)
    counts, accepted = np.zeros(VOCAB**length, dtype=np.int64), 0
    for tree in trees(shape, requests)[0]:
        verdict = rule(tree, random)
        accepted += len(verdict.path)
        text = [0, 0, *(tree.tokens[node] for node in verdict.path), verdict.bonus]
        while len(text) < length + 2:
            chances = TARGET[text[-2], text[-1]].double().numpy()
            text.append(int(random.choice(VOCAB, p=chances / chances.sum())))
        number = 0
        for token in text[2 : length + 2]:
            number = number * VOCAB + token
        counts[number] += 1
    return counts, accepted / requests


def excess(counts: np.ndarray[tuple[int], np.dtype[np.int64]], length: int) -> float:
    """Chi-square of the counts, in standard deviations above what the target's texts have."""
    chances, states = np.ones(1), [(0, 0)]
    for _ in range(length):
        chances = np.concatenate(
            [
                chance * TARGET[state].double().numpy()
                for chance, state in zip(chances, states, strict=True)
            ]
        )
        states = [(last, token) for _, last in states for token in range(VOCAB)]
    wanted = chances / chances.sum() * counts.sum()
    freedom = len(wanted) - 1
    return float((((counts - wanted) ** 2 / wanted).sum() - freedom) / (2 * freedom) ** 0.5)

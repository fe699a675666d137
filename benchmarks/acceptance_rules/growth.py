"""Trees that are drawn from a draft, for rules that reject."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vllm_graft.spec_decode.trees.shape import TreeShape


class Draft(Protocol):
    """A draft that knows the text before the root, of many requests at a time."""

    def first(self) -> Tensor:
        """Probabilities ``[requests, vocab]`` of the root's children."""
        ...

    def after(self, node: int, parents: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
        """Probabilities ``[requests, vocab]`` of the children of the `node`-th node, a new one.

        Args:
            node: its number, the same in all requests.
            parents: its parent, int64 ``[requests]``.
            tokens: its token, likewise.
            depths: its depth, likewise; 1 for the root's children.
        """
        ...


class Chance(NamedTuple):
    """The chance that a draw is accepted, as is guessed before the target runs.

    It is ``scale * q ** power``, where q is the draft's probability of what was drawn.
    """

    scale: float
    power: float

    def of(self, drawn: Tensor) -> Tensor:
        return (self.scale * drawn**self.power).clamp(max=0.95)


@dataclass(frozen=True)
class Grown:
    """Trees of many requests, node 0 is the root.

    Attributes:
        parents: int64 ``[requests, nodes + 1]``.
        tokens: likewise, in the draft's vocabulary.
        depths: likewise.
        draft: ``[requests, nodes + 1, vocab]``, the draft's probabilities after each node.
    """

    parents: Tensor
    tokens: Tensor
    depths: Tensor
    draft: Tensor


def grow(draft: Draft, shape: TreeShape, chance: Chance, noise: Tensor | None = None) -> Grown:
    """Draw trees node by node, each below the node where acceptance seems likeliest.

    Where the next node goes is decided before its token is drawn (as in DySpec, arXiv:2410.11744),
    which exact rejection needs: drafts that were drawn and then left out would change what the
    others are draws from. Levels are no wider than it takes, so that such a tree may have more rows
    of a level than an engine's has.

    Args:
        draft: what is drawn from.
        shape: nodes, and bounds of children per node and of depth.
        chance: guesses what is accepted.
        noise: Gumbel noise ``[requests, depths, vocab]`` that all nodes of a depth share. None
            draws each node by itself.
    """
    chances = draft.first()
    requests, vocab = chances.shape
    rows, count = torch.arange(requests), shape.num_nodes + 1
    parents, tokens, depths = (torch.zeros(requests, count, dtype=torch.int64) for _ in range(3))
    laws = torch.zeros(requests, count, vocab)
    left = torch.zeros(requests, count, vocab)
    tried = torch.zeros(requests, count)
    worth = torch.full((requests, count), -1.0)
    children = torch.zeros(requests, count, dtype=torch.int64)

    def judge(nodes: Tensor) -> None:
        """Say what another child of each request's node is worth."""
        rest = left[rows, nodes]
        value = tried[rows, nodes] * (rest * chance.of(rest)).sum(1)
        shut = (children[rows, nodes] >= shape.topk) | (depths[rows, nodes] >= shape.steps)
        worth[rows, nodes] = value.masked_fill(shut | (rest.sum(1) <= 0), -1.0)

    laws[:, 0] = left[:, 0] = chances
    tried[:, 0] = 1.0
    judge(parents[:, 0])
    for node in range(1, count):
        above = worth.argmax(1)
        rest, depth = left[rows, above], depths[rows, above]
        if noise is None:
            # Exponential draws divide as Gumbel noise adds, without its rounding.
            drawn = (rest / torch.empty_like(rest).exponential_()).argmax(1)
        else:
            drawn = (rest.log() + noise[rows, depth]).argmax(1)
        accepted = chance.of(rest[rows, drawn])
        parents[:, node], tokens[:, node], depths[:, node] = above, drawn, depth + 1
        tried[:, node] = tried[rows, above] * accepted
        tried[rows, above] *= 1.0 - accepted
        children[rows, above] += 1
        rest = rest.index_put((rows, drawn), torch.zeros(()))
        left[rows, above] = rest / rest.sum(1, keepdim=True).clamp(min=1e-30)
        judge(above)
        laws[:, node] = draft.after(node, above, drawn, depth + 1)
        left[:, node] = laws[:, node]
        judge(torch.full_like(above, node))
    return Grown(parents, tokens, depths, laws)

"""How likely the target's token is among a node's children, by rule and number of children."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Hits(NamedTuple):
    """Chances of acceptance ``[numbers of children]`` at one node.

    Attributes:
        likeliest: of the draft's likeliest tokens, whose draws know no noise.
        coupled: of the best by the target's own noise.
        recursive: of draws without replacement, by recursive rejection.
        bound: of the same draws, by any exact rule: it is the value of the optimal transport
            (arXiv:2310.15141), or slightly above.
    """

    likeliest: Tensor
    coupled: Tensor
    recursive: Tensor
    bound: Tensor


def hits(
    target: Tensor, draft: Tensor, ids: Tensor, numbers: list[int], draws: int, sharpness: float
) -> Hits:
    """Estimate chances of acceptance at a node.

    Args:
        target: ``[vocab]``, probabilities.
        draft: ``[draft_vocab]``, probabilities.
        ids: int64 ``[draft_vocab]``, the target's id of each draft token.
        numbers: of children, ascending.
        draws: how many sets of children are drawn; an even number.
        sharpness: factor of the draft's logits, for all rules.
    """
    draft = (draft.log() * sharpness).softmax(0)
    most = min(numbers[-1], len(draft))
    clocks = torch.empty(draws, len(target)).exponential_().clamp_(min=1e-30)
    # The first of clocks of these rates is a draw, and the first few are draws without replacement.
    emitted = (target / clocks).argmax(1)
    children = (draft / clocks[:, ids]).topk(most, 1).indices
    right = (ids[children] == emitted[:, None]).cummax(1).values.float().mean(0)
    places = torch.tensor(numbers).clamp(max=most) - 1
    likeliest = target[ids[draft.topk(most).indices]].cumsum(0)
    whole = torch.zeros_like(target).index_put((ids,), draft)
    return Hits(
        likeliest[places],
        right[places],
        _recursive(target, whole, ids[children])[places],
        torch.stack([_bound(target, whole, ids[children[:, :n]]) for n in numbers]),
    )


def _recursive(target: Tensor, draft: Tensor, children: Tensor) -> Tensor:
    """Chance that one of the first 1, 2, ... of `children` ``[draws, most]`` is accepted."""
    draws, most = children.shape
    target, draft = target.expand(draws, -1), draft.expand(draws, -1)
    missed, found = torch.ones(draws), []
    for number in range(most):
        token = children[:, number, None]
        chance = target.gather(1, token) / draft.gather(1, token).clamp(min=1e-30)
        missed = missed * (1.0 - chance[:, 0].clamp(max=1.0))
        found.append(1.0 - missed.mean())
        target = (target - draft).clamp(min=0.0)
        target = target / target.sum(1, keepdim=True).clamp(min=1e-30)
        draft = draft.scatter(1, token, 0.0)
        draft = draft / draft.sum(1, keepdim=True).clamp(min=1e-30)
    return torch.stack(found)


def _bound(target: Tensor, draft: Tensor, children: Tensor) -> Tensor:
    """Bound of the chance that an exact rule emits one of `children` ``[draws, number]``.

    What is emitted lies in a set A of tokens with the target's probability, and can be one of the
    children only if A has one. So the chance is at most ``1 - target(A) + P(A has a child)`` for
    any A, and it can be the least of these. Tried are all A of the tokens whose ratio of target to
    draft is largest. A is chosen with half of the draws and judged by the others, so that the
    bound holds on average.
    """
    order = (target / draft.clamp(min=1e-30)).argsort(descending=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    first = rank[children].min(1).values
    outside = 1.0 - target[order].cumsum(0)

    def values(firsts: Tensor) -> Tensor:
        met = torch.bincount(firsts, minlength=len(order)).cumsum(0) / len(firsts)
        return torch.cat((torch.ones(1), outside + met))

    half = len(first) // 2
    some, others = values(first[:half]), values(first[half:])
    return (others[some.argmin()] + some[others.argmin()]) / 2

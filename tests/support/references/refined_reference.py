"""An XPress refiner with random weights, and what it says of one path, a channel at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class RefinerHead(nn.Module):
    """Stands for vLLM's ``XPressRefinerHead``, with its names and none of its kernels."""

    def __init__(self, vocab: int, hidden: int, rows: int, rank: int, inner: int, topc: int = 0):
        super().__init__()
        self.rank, self.topc = rank, topc
        self.w1 = nn.Embedding(vocab, rank)
        self.down_h, self.down_g = (nn.Linear(hidden, rank, bias=False) for _ in range(2))
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_L = nn.Parameter(torch.zeros(rank, rows, rows))
        self.mlp_gate, self.mlp_up = (nn.Linear(rank, inner, bias=False) for _ in range(2))
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.w2 = nn.Linear(rank, vocab, bias=False)

    def hidden_cache(self, blocks: torch.Tensor) -> torch.Tensor:
        """States and their mean, two numbers per channel and row."""
        mean = torch.stack([block.mean(0).expand_as(block) for block in blocks])
        return torch.cat([self.down_h(blocks), self.down_g(mean)], -1)

    def fold(self, raw: torch.Tensor) -> None:
        """Set the mix from the checkpoint's, to which each row's own place is added."""
        self.mix_L.data.copy_(raw.tril() + torch.eye(raw.shape[-1]))


def refined_logits(
    head: Any, states: torch.Tensor, base: torch.Tensor, path: list[int]
) -> torch.Tensor:
    """Logits behind a path.

    Args:
        head: the refiner.
        states: ``[rows, hidden]``, the states of a whole block.
        base: ``[vocabulary]``, the logits of the position behind the path, without a bias.
        path: the last token and the drafts behind it.

    Returns:
        ``[vocabulary]``, -inf for tokens that are no candidates.
    """
    place, rank = len(path), head.rank
    whole = states.mean(0)
    projection = head.in_proj.weight
    mixed = torch.zeros(rank)
    for row in range(place + 1):
        before = path[max(row - 1, 0)]
        parts = [
            head.down_h.weight @ states[row],
            head.down_g.weight @ whole,
            head.w1.weight[before],
        ]
        mixed += head.mix_L[:, place, row] * (projection @ torch.cat(parts))
    gate = head.mlp_gate.weight @ mixed
    inner = gate * torch.sigmoid(gate) * (head.mlp_up.weight @ mixed)
    logits = base + head.w2.weight @ (mixed + head.mlp_down.weight @ inner)
    if head.topc and head.topc < len(base):
        left_out = base < base.topk(head.topc).values[-1]
        logits = logits.masked_fill(left_out, float("-inf"))
    return logits

"""Scores of a block's positions behind every node of a tree, by the refiner of an XPress draft."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from vllm_graft.spec_decode.drafters.base import Children
from vllm_graft.spec_decode.heads.head import SHARPNESS
from vllm_graft.spec_decode.kernels.topk import Noise, topk_logprobs
from vllm_graft.spec_decode.trees.tree import CandidateTable


class Refiner:
    """The part of an XPress head that doesn't depend on drafts, and what a token adds to it.

    A row of a block, the last token's or a mask's, is a vector of rank r: a term of its state and
    of the mean of all states of the block, and a term of the token before it. The row of the last
    token takes the last token for the one before it. A mix with weights per channel adds up the
    rows up to a position, an MLP follows, and the output layer makes a bias for each token.
    `head` is vLLM's ``XPressRefinerHead``, `blocks` are the draft's states ``[R, rows, hidden]``.
    """

    def __init__(self, head: Any, blocks: torch.Tensor) -> None:
        self.head = head
        of_states, self._of_tokens = head.in_proj.weight.split([2 * head.rank, head.rank], dim=1)
        self._states = F.linear(head.hidden_cache(blocks), of_states).float()

    def row(self, place: int, before: torch.Tensor) -> torch.Tensor:
        """The row at a place of the block behind each of some tokens, f32 ``[R, nodes, r]``. Place
        0 is the last token's own."""
        return (
            self._states[:, place, None] + F.linear(self.head.w1(before), self._of_tokens).float()
        )

    def latents(self, rows: torch.Tensor) -> torch.Tensor:
        """What the output layer reads of the newest place, ``[R * nodes, r]``. `rows` are f32 ``[R,
        nodes, places, r]``, those of each node's path from the place 0 on."""
        head, places = self.head, rows.shape[2]
        weights = head.mix_L[:, places - 1, :places].t().float()
        mixed = (rows * weights).sum(2).flatten(0, 1)
        narrow = mixed.to(head.w1.weight.dtype)
        inner = F.silu(head.mlp_gate(narrow)) * head.mlp_up(narrow)
        return (mixed + head.mlp_down(inner).float()).to(narrow.dtype)


class Refined:
    """A `Lattice` whose scores are a position's logits and a bias by all tokens of a node's path.
    Where the checkpoint limits the refiner to so many candidates per position (``xpress_topc``),
    the other tokens are left out, as vLLM's chain does it. `logits`, before the bias, are ``[R,
    levels, vocabulary]``, `roots` int ``[R]``; `noise` is as of `BlockTrees.level_noise`."""

    def __init__(
        self,
        refiner: Refiner,
        logits: torch.Tensor,
        roots: torch.Tensor,
        topk: int,
        noise: Callable[[int, int], Noise | None],
    ) -> None:
        self._refiner, self._logits, self._topk, self._noise = refiner, logits, topk, noise
        self._roots = roots.long()[:, None]
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        if count := min(refiner.head.topc, logits.shape[-1]):
            # Not vLLM's own function, which may be FlashInfer's: equal logits have to give equal
            # candidates on every rank.
            values, ids = logits.topk(count, dim=-1)
            self._kept = values, ids
        self._rows = logits.new_empty(0)
        self._first_candidate = 0

    def first(self) -> Children:
        rows = [self._refiner.row(place, self._roots) for place in (0, 1)]
        self._rows = torch.stack(rows, 2)
        logp, ids = self._best(0)
        return logp[:, 0], ids[:, 0]

    def below(self, level: int, table: CandidateTable, tokens: torch.Tensor) -> Children:
        num_reqs, topk = len(self._roots), self._topk
        if level == 1:
            rows = self._rows.expand(-1, topk, -1, -1)
        else:
            # A node's place among the newest candidates tells its parent's in the last frontier.
            newest = table.frontier_candidates[:num_reqs].long() - self._first_candidate
            parents = (newest // topk)[:, :, None, None].expand(-1, -1, *self._rows.shape[2:])
            rows = self._rows.gather(1, parents)
        self._first_candidate += topk if level == 1 else topk**2
        row = self._refiner.row(level + 1, tokens.view(num_reqs, topk))
        self._rows = torch.cat([rows, row[:, :, None]], 2)
        return self._best(level)

    def _best(self, level: int) -> Children:
        latents, nodes = self._refiner.latents(self._rows), self._rows.shape[1]
        noise = self._noise(level, nodes)
        if self._kept is None:
            biases = self._refiner.head.w2(latents)
            shared = self._logits[:, level]
            best = topk_logprobs(shared, self._topk, None, None, noise, SHARPNESS, biases)
        else:
            logits = self._summed(level, latents, nodes)
            best = topk_logprobs(logits, self._topk, None, None, noise, SHARPNESS)
        logp, ids = (each.unflatten(0, (-1, nodes)) for each in best)
        return logp, ids

    def _summed(self, level: int, latents: torch.Tensor, nodes: int) -> torch.Tensor:
        """Logits of the candidates with their biases, -inf elsewhere, ``[R * nodes, vocabulary]``.
        They stand where their tokens do, as noise belongs to tokens."""
        assert self._kept is not None
        values, ids = (each[:, level] for each in self._kept)
        weights = self._refiner.head.w2.weight[ids]
        biases = torch.bmm(latents.unflatten(0, (-1, nodes)), weights.transpose(1, 2))
        logits = (biases + values[:, None]).flatten(0, 1)
        whole = self._logits.new_full((len(latents), self._logits.shape[-1]), float("-inf"))
        return whole.scatter_(1, ids.repeat_interleave(nodes, 0), logits)

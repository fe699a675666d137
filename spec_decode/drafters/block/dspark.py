"""Trees from DSpark drafts, whose tokens depend on the token before by a bias of low rank."""

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from vllm_graft.spec_decode.drafters.base import Children
from vllm_graft.spec_decode.drafters.block.block_trees import BlockTrees
from vllm_graft.spec_decode.heads.head import SHARPNESS
from vllm_graft.spec_decode.kernels.topk import topk_logprobs
from vllm_graft.spec_decode.trees.tree import CandidateTable


class Biased:
    """A `Lattice` whose scores are a position's logits and a bias by the token before. With
    ``dspark_draft_topk`` the bias is added to so many of the best logits of each position, as
    vLLM's chain does it, and the other tokens are left out. `logits` are ``[R, positions, draft
    vocabulary]``, `roots` int ``[R]``, tokens of the target's vocabulary."""

    def __init__(self, drafter: BlockTrees, logits: torch.Tensor, roots: torch.Tensor) -> None:
        self._drafter, self._logits, self._roots = drafter, logits, roots
        self._noise = drafter.level_noise(len(roots))
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        if drafter._draft_topk is not None:
            values, ids = logits.topk(drafter._draft_topk, dim=-1)
            self._kept = values, ids

    def first(self) -> Children:
        return self._best(0, self._roots, 1)

    def below(self, level: int, table: CandidateTable, tokens: torch.Tensor) -> Children:
        logp, ids = self._best(level, tokens, table.topk)
        shape = (len(self._roots), table.topk, table.topk)
        return logp.view(shape), ids.view(shape)

    def _best(self, level: int, before: torch.Tensor, nodes: int) -> Children:
        """The best tokens behind the tokens ``before [R * nodes]``, ``[R * nodes, K]`` each."""
        drafter = self._drafter
        model: Any = drafter.model
        embedded = model.markov_embed(before)
        # Since vLLM 0.33: some targets transform their logits.
        transform = getattr(model, "apply_output_logit_transform", None)
        noise = self._noise(level, nodes)
        topk, ids = drafter.topk, drafter.head.target_ids
        if self._kept is None and transform is None:
            biases, shared = model.markov_bias(embedded), self._logits[:, level]
            return topk_logprobs(shared, topk, ids, None, noise, SHARPNESS, biases)
        logits = self._summed(level, embedded, nodes)
        if transform is not None:
            logits = transform(logits)
        return topk_logprobs(logits, topk, ids, None, noise, SHARPNESS)

    def _summed(self, level: int, embedded: torch.Tensor, nodes: int) -> torch.Tensor:
        """Logits with their biases, ``[R * nodes, draft vocabulary]``."""
        model: Any = self._drafter.model
        if self._kept is None:
            logits: torch.Tensor = model.markov_bias(embedded)
            logits.unflatten(0, (len(self._roots), nodes)).add_(self._logits[:, level, None])
            return logits
        values, ids = (each[:, level].repeat_interleave(nodes, 0) for each in self._kept)
        logits = self._logits.new_full((len(embedded), self._logits.shape[-1]), float("-inf"))
        summed: torch.Tensor = model.apply_markov_bias_gathered(embedded, logits, values, ids)
        return summed


class DSparkTrees(BlockTrees, DSparkSpeculator):
    """What vLLM builds in the place of `DSparkSpeculator`."""

    def make_lattice(self, num_reqs: int, states: torch.Tensor) -> Biased:
        """The logits of all positions, to which the biases come level by level."""
        logits = self.own_head_logits(states).unflatten(0, (num_reqs, self.positions))
        return Biased(self, logits, self.block_roots(num_reqs))

"""Trees from DSpark drafts, whose tokens depend on the token before by a bias of low rank."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from vllm_graft.spec_decode.drafters.block.block_trees import BlockTrees
from vllm_graft.spec_decode.drafters.passless import Children
from vllm_graft.spec_decode.heads.head import SHARPNESS
from vllm_graft.spec_decode.kernels.topk import topk_logprobs
from vllm_graft.spec_decode.trees.candidates import CandidateTable


class DSparkTrees(BlockTrees, DSparkSpeculator):
    """What vLLM builds in the place of `DSparkSpeculator`."""

    def make_lattice(self, num_reqs: int, states: torch.Tensor) -> Biased:
        """The logits of all positions, to which the biases come level by level."""
        if self.head.fp8 is None:
            logits = self.model.compute_draft_logits(states)
        else:
            logits = self.head.logits(states)
        roots = self.input_buffers.input_ids[self._anchor_idx[:num_reqs]]
        return Biased(self, logits.unflatten(0, (num_reqs, self.depth)), roots)


class Biased:
    """A `Lattice` whose scores are a position's logits and a bias by the token before.

    With ``dspark_draft_topk`` the bias is added to so many of the best logits of each position, as
    vLLM's chain does it, and the other tokens are left out.

    Args:
        drafter: has the draft and the sizes of trees.
        logits: ``[R, depth, draft vocabulary]``, before the bias.
        roots: int ``[R]``, the last tokens of the requests, of the target's vocabulary.
    """

    def __init__(self, drafter: DSparkTrees, logits: torch.Tensor, roots: torch.Tensor) -> None:
        self._drafter, self._logits, self._roots = drafter, logits, roots
        self._draws = drafter.draws(len(roots))
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        if drafter._draft_topk is not None:
            values, ids = logits.topk(drafter._draft_topk, dim=-1)
            self._kept = values, ids

    def first(self) -> Children:
        """The best tokens behind the roots."""
        return self._best(0, self._roots, 1)

    def below(self, level: int, table: CandidateTable, tokens: torch.Tensor) -> Children:
        """The best tokens behind each node of the frontier."""
        logp, ids = self._best(level, tokens, table.topk)
        shape = (len(self._roots), table.topk, table.topk)
        return logp.view(shape), ids.view(shape)

    def _best(self, level: int, before: torch.Tensor, nodes: int) -> Children:
        """The best tokens behind the tokens ``before [R * nodes]``, ``[R * nodes, K]`` each."""
        drafter, num_reqs = self._drafter, len(self._roots)
        model: Any = drafter.model
        embedded = model.markov_embed(before)
        if self._kept is None:
            logits = model.markov_bias(embedded)
            logits.unflatten(0, (num_reqs, nodes)).add_(self._logits[:, level, None])
        else:
            values, ids = (each[:, level].repeat_interleave(nodes, 0) for each in self._kept)
            logits = self._logits.new_full((len(before), self._logits.shape[-1]), float("-inf"))
            logits = model.apply_markov_bias_gathered(embedded, logits, values, ids)
        # Since vLLM 0.33: some targets transform their logits.
        if (transform := getattr(model, "apply_output_logit_transform", None)) is not None:
            logits = transform(logits)
        positions = self._draws[:, level, None].expand(-1, nodes).reshape(-1)
        noise = drafter.noise(num_reqs, positions, rows=nodes, offset=0)
        return topk_logprobs(
            logits, drafter.shape.topk, drafter.head.target_ids, None, noise, SHARPNESS
        )

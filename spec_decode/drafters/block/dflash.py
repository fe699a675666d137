"""Trees from DFlash drafts, whose positions don't depend on each other (arXiv 2602.06036)."""

import torch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_graft.spec_decode.drafters.block.block_trees import BlockTrees, Marginals


class DFlashTrees(BlockTrees, DFlashSpeculator):
    """What vLLM builds in the place of `DFlashSpeculator`."""

    def make_lattice(self, num_reqs: int, states: torch.Tensor) -> Marginals:
        """The best tokens of all positions, by one product with the output head."""
        positions = self.draws(num_reqs).flatten()
        noise = self.noise(num_reqs, positions, rows=self.positions, offset=0)
        logp, tokens = self.head.top(states, self.topk, noise=noise)
        shape = (num_reqs, self.positions, self.topk)
        return Marginals(logp.view(shape), tokens.view(shape))

"""Trees from XPress drafts, whose refiner biases a token by the tokens of its own path."""

import torch
from vllm.v1.worker.gpu.spec_decode.xpress.speculator import XPressSpeculator

from vllm_graft.spec_decode.drafters.block.block_trees import BlockTrees
from vllm_graft.spec_decode.drafters.block.refined import Refined, Refiner


class XPressTrees(BlockTrees, XPressSpeculator):
    """What vLLM builds in the place of `XPressSpeculator`, from vLLM 0.33 on.

    VLLM's chain refines all positions of a greedy block at once, as often as ``xpress_num_passes``
    says. As a position is biased by those before it alone, these passes end where the positions,
    taken one after the other, would have led. A tree takes them so, a level at a time: its best
    path is the chain that enough passes would have found. Every pass is over the whole block, as
    the refiner reads the mean of the block's states."""

    cuts_positions = False

    def read_states(self, num_reqs: int, states: torch.Tensor) -> torch.Tensor:
        """The states of whole blocks, of which the last token's own is the first."""
        return states[: num_reqs * self.num_query_per_req]

    def make_lattice(self, num_reqs: int, states: torch.Tensor) -> Refined:
        shape = self.plan.shape
        levels = min(shape.steps, shape.num_nodes)
        blocks = states.unflatten(0, (num_reqs, self.num_query_per_req))
        logits = self.own_head_logits(blocks[:, 1 : levels + 1].flatten(0, 1))
        refiner = Refiner(self.model.model.xpress_head, blocks)
        return Refined(
            refiner,
            logits.unflatten(0, (num_reqs, levels)),
            self.block_roots(num_reqs),
            self.topk,
            self.level_noise(num_reqs),
        )

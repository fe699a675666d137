"""Trees from DFlash 2 and LiLiCorr drafts, which score pairs of neighbouring candidates."""

import torch
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator

from vllm_graft.spec_decode.drafters.block.block_trees import BlockTrees, Edges


class DFlash2Trees(BlockTrees, DFlash2Speculator):
    """What vLLM builds in the place of `DFlash2Speculator`.

    Drafts of sampled requests are ranked without the target's noise, which belongs to tokens of the
    whole vocabulary and not to a few candidates. Every pass is over the whole block: the
    convolutions of DFlash 2 tell a row's position by the length that the draft was loaded for, and
    LiLiCorr's candidates see those of all positions."""

    cuts_positions = False
    # What stands for a model has no scores of pairs.
    grows_from_block = False

    def make_lattice(self, num_reqs: int, states: torch.Tensor) -> Edges:
        ids, unary = self.model.compute_candidates(states)
        shape = (num_reqs, self.positions, self.top_k)
        ids, unary = ids.view(shape), unary.view(shape)
        by_position = states.view(num_reqs, self.positions, -1)
        scores = self._score_candidates(ids, unary, by_position)
        return Edges(ids, scores, self.topk)


class LiLiCorrTrees(BlockTrees, LiLiCorrSpeculator):
    """What vLLM builds in the place of `LiLiCorrSpeculator`: DFlash 2 with other scores."""

    cuts_positions = grows_from_block = False
    make_lattice = DFlash2Trees.make_lattice

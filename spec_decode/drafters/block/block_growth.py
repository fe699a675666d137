"""Grows trees from the lattice that one pass over a block has left."""

from __future__ import annotations

from typing import Any

import torch

from vllm_graft.spec_decode.drafters.passless import PasslessGrowth


class BlockGrowth(PasslessGrowth):
    """The scores of all depths are there when the tree is grown (see `Lattice`).

    ``steps`` of its shape is at most the number of positions that predict. The best nodes are kept
    by the sum of log-probabilities from the root, which for independent positions is the product of
    the marginals (DDTree, arXiv 2604.12989).
    """

    def grow(
        self,
        drafter: Any,
        num_reqs: int,
        metadata: list[Any] | None,
        num_tokens_across_dp: torch.Tensor | None = None,
        *,
        num_nodes: int,
        narrow: bool = False,
    ) -> int:
        """Fill the table from ``drafter.lattice``; see `Growth.grow`."""
        lattice, frontier = drafter.lattice, self.tokens[: num_reqs * self.shape.topk]
        return self.fill(
            lattice.first(),
            lambda level: lattice.below(level, self.candidates, frontier),
            num_reqs,
            num_nodes,
        )

"""Grows trees from the lattice that one pass over a block has left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_graft.spec_decode.kernels.expand import expand_frontier, seed_frontier
from vllm_graft.spec_decode.trees.candidates import CandidateTable

if TYPE_CHECKING:
    from vllm_graft.spec_decode.trees.shape import TreeShape


class BlockGrowth:
    """A `Growth` without any pass: the scores of all depths are there (see `Lattice`).

    The best nodes are kept by the sum of log-probabilities from the root, which for independent
    positions is the product of the marginals (DDTree, arXiv 2604.12989).

    Args:
        shape: bounds of the trees; ``steps`` is the number of positions that predict.
        max_reqs: most requests of a batch.
        device: where the table lies.
        extra: columns of the table that are for other sources than the draft.
    """

    def __init__(
        self, shape: TreeShape, max_reqs: int, device: torch.device, *, extra: int = 0
    ) -> None:
        self.shape = shape
        self.candidates = CandidateTable.allocate(
            max_reqs, shape.topk, shape.steps, device, extra=extra
        )
        rows = max_reqs * shape.topk
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._parents = torch.zeros(rows, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        """Device bytes of the table and of the frontier."""
        tensors = [*vars(self.candidates).values(), self._tokens, self._parents]
        return sum(tensor.nbytes for tensor in tensors)

    def set_prefix(self, seq_lens: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """Do nothing: no keys are read."""

    def clear_prefix(self) -> None:
        """Do nothing, likewise."""

    def map_block_tables(self, drafter: Any) -> None:
        """Do nothing, likewise."""

    def metadata(self, num_reqs: int, max_seq_len: int) -> list[Any]:
        """No pass needs metadata."""
        return []

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
        steps, rows = min(self.shape.steps, num_nodes), num_reqs * self.shape.topk
        lattice = drafter.lattice
        logp, tokens = lattice.first()
        seed_frontier(self.candidates, logp, tokens, num_reqs, next_tokens=self._tokens)
        for level in range(1, steps):
            logp, tokens = lattice.below(level, self.candidates, self._tokens[:rows])
            expand_frontier(
                self.candidates,
                level,
                logp,
                tokens,
                num_reqs,
                next_tokens=self._tokens,
                parent_rows=self._parents,
            )
        return steps

"""Grows trees whose levels take no pass of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vllm_graft.spec_decode.kernels.candidates import expand_frontier, seed_frontier
from vllm_graft.spec_decode.trees.tree import CandidateTable

if TYPE_CHECKING:
    from vllm_graft.spec_decode.trees.tree import TreeShape

Children = tuple[torch.Tensor, torch.Tensor]
"""Log-probabilities f32 and the target's token ids int64, of the same shape."""


class PasslessGrowth:
    """Base of a `Growth` that reads no cache: a subclass has `grow`, which calls `fill`.

    Attributes:
        tokens: int64 ``[max_reqs * topk]``, tokens of the frontier.
    """

    def __init__(
        self, shape: TreeShape, max_reqs: int, device: torch.device, *, extra: int = 0
    ) -> None:
        self.shape = shape
        self.candidates = CandidateTable.allocate(
            max_reqs, shape.topk, shape.steps, device, extra=extra
        )
        self.tokens = torch.zeros(max_reqs * shape.topk, dtype=torch.int64, device=device)
        self._parents = torch.zeros_like(self.tokens)

    @property
    def num_bytes(self) -> int:
        tensors = [*vars(self.candidates).values(), self.tokens, self._parents]
        return sum(tensor.nbytes for tensor in tensors)

    def set_prefix(self, seq_lens: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """Do nothing: no keys are read."""

    def clear_prefix(self) -> None: ...

    def map_block_tables(self, drafter: Any) -> None: ...

    def metadata(self, num_reqs: int, max_seq_len: int) -> list[Any]:
        return []

    def fill(
        self, first: Children, below: Callable[[int], Children], num_reqs: int, num_nodes: int
    ) -> int:
        """Fill the table, and return the number of levels that it holds. Capturable if `below` is.

        `first` are the root's best children, ``[num_reqs, topk]`` each, best first. `below` returns
        the best children of a level's frontier by the number of the level, as `expand_frontier`
        takes them; `tokens` has the frontier's.
        """
        steps = min(self.shape.steps, num_nodes)
        seed_frontier(self.candidates, *first, num_reqs, next_tokens=self.tokens)
        for level in range(1, steps):
            logp, tokens = below(level)
            expand_frontier(
                self.candidates,
                level,
                logp,
                tokens,
                num_reqs,
                next_tokens=self.tokens,
                parent_rows=self._parents,
            )
        return steps

"""What one pass over a block says of every depth, and how a tree reads it."""

from typing import Any, Protocol

import torch

from vllm_graft.spec_decode.drafters.base import Children, PasslessGrowth
from vllm_graft.spec_decode.heads.head import SHARPNESS
from vllm_graft.spec_decode.kernels.topk import topk_logprobs
from vllm_graft.spec_decode.trees.tree import CandidateTable


class Lattice(Protocol):
    """Tokens and scores at each depth of a block. All of its methods are capturable.

    R is the number of requests, padding included, and K the number of children of a node, which is
    also the number of nodes of a level that get children.
    """

    def first(self) -> Children:
        """The root's best children, ``[R, K]`` each, best first."""
        ...

    def below(self, level: int, table: CandidateTable, tokens: torch.Tensor) -> Children:
        """The best children of the frontier, ``[R, K, K]`` each, the siblings best first.

        Levels are asked for in order; the root's children are level 0. The frontier of `table` is
        that of ``level - 1``, and `tokens`, int64 ``[R * K]``, are its nodes'.
        """
        ...


class Marginals:
    """Positions that are independent of each other: all nodes of a level get the same children.

    `logp` f32 and `tokens` int64 are each position's best, ``[R, positions, K]``.
    """

    def __init__(self, logp: torch.Tensor, tokens: torch.Tensor) -> None:
        self._logp, self._tokens = logp, tokens

    def first(self) -> Children:
        return self._logp[:, 0], self._tokens[:, 0]

    def below(self, level: int, table: CandidateTable, tokens: torch.Tensor) -> Children:
        logp, ids = (each[:, level, None] for each in (self._logp, self._tokens))
        nodes = table.topk
        return logp.expand(-1, nodes, -1), ids.expand(-1, nodes, -1)


class Edges:
    """A few candidates per position, and a score for each pair of neighbours.

    `ids` int64 ``[R, positions, C]`` are the target's; `scores` f32 ``[R, positions, C, C]`` are by
    the candidate before and the candidate. The first position has the same candidate before all of
    its own, the first one.
    """

    def __init__(self, ids: torch.Tensor, scores: torch.Tensor, topk: int) -> None:
        self._ids, self._scores, self._topk = ids, scores.float(), topk
        self._places: torch.Tensor | None = None
        self._first_candidate = 0

    def first(self) -> Children:
        logp, ids = self._best(0, self._scores[:, 0, :1])
        return logp[:, 0], ids[:, 0]

    def below(self, level: int, table: CandidateTable, tokens: torch.Tensor) -> Children:
        assert self._places is not None
        num_reqs = len(self._ids)
        # Where the frontier's nodes stand among the candidates of their position.
        newest = table.frontier_candidates[:num_reqs].long() - self._first_candidate
        before = self._places.gather(1, newest)
        width = self._scores.shape[-1]
        rows = self._scores[:, level].gather(1, before[:, :, None].expand(-1, -1, width))
        self._first_candidate += self._topk if level == 1 else self._topk**2
        return self._best(level, rows)

    def _best(self, level: int, scores: torch.Tensor) -> Children:
        """The best candidates by scores ``[R, nodes, C]``; notes their places."""
        num_reqs, nodes, width = scores.shape
        logp, places = topk_logprobs(scores.reshape(-1, width), self._topk, sharpness=SHARPNESS)
        self._places = places.view(num_reqs, nodes * self._topk)
        ids = self._ids[:, level].gather(1, self._places)
        shape = (num_reqs, nodes, self._topk)
        return logp.view(shape), ids.view(shape)


class BlockGrowth(PasslessGrowth):
    """The scores of all depths are there when the tree is grown (see `Lattice`).

    ``steps`` of its shape is at most the number of positions that predict. The best nodes are kept
    by the sum of log-probabilities from the root, which for independent positions is the product of
    the marginals (DDTree, arXiv 2604.12989).
    """

    def grow(
        self, drafter: Any, num_reqs: int, *passes: Any, num_nodes: int, narrow: bool = False
    ) -> int:
        lattice, frontier = drafter.lattice, self.tokens[: num_reqs * self.shape.topk]
        return self.fill(
            lattice.first(),
            lambda level: lattice.below(level, self.candidates, frontier),
            num_reqs,
            num_nodes,
        )

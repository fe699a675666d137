"""What one pass over a block says of every depth, and how a tree reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from vllm_graft.spec_decode.drafters.passless import Children
from vllm_graft.spec_decode.heads.head import SHARPNESS
from vllm_graft.spec_decode.kernels.topk import topk_logprobs

if TYPE_CHECKING:
    from vllm_graft.spec_decode.trees.candidates import CandidateTable


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

        Args:
            level: of the children; the root's are level 0. Levels are asked for in order.
            table: the candidates; its frontier is that of ``level - 1``.
            tokens: int64 ``[R * K]``, tokens of the frontier's nodes.
        """
        ...


class Marginals:
    """Positions that are independent of each other: all nodes of a level get the same children.

    Args:
        logp: f32 ``[R, positions, K]``, log-probabilities of each position's best tokens.
        tokens: int64, likewise, their ids.
    """

    def __init__(self, logp: torch.Tensor, tokens: torch.Tensor) -> None:
        self._logp, self._tokens = logp, tokens

    def first(self) -> Children:
        """The best tokens of the first position."""
        return self._logp[:, 0], self._tokens[:, 0]

    def below(self, level: int, table: CandidateTable, tokens: torch.Tensor) -> Children:
        """The best tokens of the level's position, once for each node of the frontier."""
        logp, ids = (each[:, level, None] for each in (self._logp, self._tokens))
        nodes = table.topk
        return logp.expand(-1, nodes, -1), ids.expand(-1, nodes, -1)


class Edges:
    """A few candidates per position, and a score for each pair of neighbours.

    Args:
        ids: int64 ``[R, positions, C]``, the candidates, tokens of the target.
        scores: f32 ``[R, positions, C, C]``, by the candidate before and the candidate. The first
            position has the same candidate before all of its own, the first one.
        topk: K, at most C.
    """

    def __init__(self, ids: torch.Tensor, scores: torch.Tensor, topk: int) -> None:
        self._ids, self._scores, self._topk = ids, scores.float(), topk
        self._places: torch.Tensor | None = None
        self._first_candidate = 0

    def first(self) -> Children:
        """The best candidates of the first position."""
        logp, ids = self._best(0, self._scores[:, 0, :1])
        return logp[:, 0], ids[:, 0]

    def below(self, level: int, table: CandidateTable, tokens: torch.Tensor) -> Children:
        """The best candidates of the level's position behind each node of the frontier."""
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

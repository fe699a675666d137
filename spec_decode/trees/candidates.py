"""Scores, tokens and ancestry of all nodes that the draft has proposed in one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_graft.spec_decode.trees.shape import num_candidates


@dataclass(frozen=True)
class CandidateTable:
    """The candidates of EAGLE-2's expansion (arXiv:2406.16858), one table row per batch row.

    Candidate ``i < topk`` is the ``i``-th child of the root. Candidate
    ``topk + (level - 1) * topk ** 2 + f * topk + c`` is child ``c`` of the ``f``-th node of the
    frontier of ``level - 1``. The frontier is the ``topk`` best candidates of the newest level.
    Columns behind the levels that were grown may hold candidates of other sources, whose parents
    are any candidates before them.
    Scratch slot ``level * topk + f`` holds the draft's K/V of frontier node ``f`` of ``level``.

    Attributes:
        scores: f32 ``[max_reqs, width]``, sum of log-probabilities from the root.
        tokens: i64 ``[max_reqs, width]``, token ids of the target's vocabulary.
        parents: i32 ``[max_reqs, width]``, candidate index, -1 for children of the root.
        frontier_scores: f32 ``[max_reqs, topk]``.
        frontier_candidates: i32 ``[max_reqs, topk]``, candidate index.
        ancestors: i32 ``[max_reqs, topk, steps]``, scratch slots of each frontier node's ancestors
            by level, up to and including the node itself; later levels are undefined.
    """

    scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    frontier_scores: torch.Tensor
    frontier_candidates: torch.Tensor
    ancestors: torch.Tensor

    @classmethod
    def allocate(
        cls, max_reqs: int, topk: int, steps: int, device: torch.device | str, extra: int = 0
    ) -> CandidateTable:
        """A zeroed table, with `extra` columns for candidates of other sources than the draft."""
        width = num_candidates(topk, steps) + extra
        return cls(
            scores=torch.zeros(max_reqs, width, dtype=torch.float32, device=device),
            tokens=torch.zeros(max_reqs, width, dtype=torch.int64, device=device),
            parents=torch.zeros(max_reqs, width, dtype=torch.int32, device=device),
            frontier_scores=torch.zeros(max_reqs, topk, dtype=torch.float32, device=device),
            frontier_candidates=torch.zeros(max_reqs, topk, dtype=torch.int32, device=device),
            ancestors=torch.zeros(max_reqs, topk, steps, dtype=torch.int32, device=device),
        )

    @property
    def topk(self) -> int:
        return int(self.ancestors.shape[1])

    @property
    def steps(self) -> int:
        return int(self.ancestors.shape[2])

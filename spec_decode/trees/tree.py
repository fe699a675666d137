"""The data of a draft tree: its shape, its candidates while it is drafted, and its topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_graft.base.errors import GraftError
from vllm_graft.base.values import lever
from vllm_graft.seams.ranks import gather_rows

# The sections of the configuration, which read the bounds of trees, come without torch.
if TYPE_CHECKING:
    import torch


def num_candidates(topk: int, steps: int) -> int:
    """Candidates after ``steps`` levels: ``topk`` at level 0, ``topk ** 2`` at each later one."""
    return topk + (steps - 1) * topk * topk


MAX_NODES = 63
"""Bits of an int64 ancestor mask that are left beside the root's."""


@dataclass(frozen=True)
class TreeShape:
    """Bounds of a draft tree. `topk`: children drafted per node, and nodes per level that get
    children. `steps`: levels below the root; the draft runs ``steps - 1`` times after its extend
    pass. `num_nodes`: drafted nodes that are kept for verification, not counting the root."""

    topk: int
    steps: int
    num_nodes: int

    @property
    def num_candidates(self) -> int:
        """Nodes that drafting scores, of which `num_nodes` are kept (EAGLE-2, section 4.2)."""
        return num_candidates(self.topk, self.steps)


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
        import torch

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


@dataclass(frozen=True)
class TreeState:
    """Topology by request-state index. Node 0 is the root: the last accepted token.

    Nodes 1 to ``num_nodes`` are drafts, best cumulative score first, so parents come before
    children and the first ``n`` drafts are the best tree of ``n``. `parents`: i32 ``[max_reqs,
    num_nodes + 1]``, node index, -1 for the root. `depths`: i32 ``[max_reqs, num_nodes + 1]``,
    edges from the root. `masks`: i64 ``[max_reqs, num_nodes + 1]``; bit ``j`` is set if node ``j``
    is the node itself or one of its ancestors. Bit 63 is the sign bit."""

    parents: torch.Tensor
    depths: torch.Tensor
    masks: torch.Tensor

    @classmethod
    def allocate(cls, max_reqs: int, num_nodes: int, device: torch.device | str) -> TreeState:
        """Trees for ``max_reqs`` request-state slots, as stars: each draft is a child of the root.
        vLLM reads a tree before one was drafted: it gives placeholders for drafts to a request that
        has one token left to compute. They are rejected, but the root's row has to be right. Raises
        `ValueError` if ``num_nodes`` is not 1 to `MAX_NODES`."""
        import torch

        if not 1 <= num_nodes <= MAX_NODES:
            raise ValueError(f"a tree has 1 to {MAX_NODES} draft nodes, not {num_nodes}")
        node = torch.arange(num_nodes + 1, device=device)
        is_draft = (node > 0).to(torch.int32)
        one = torch.ones((), dtype=torch.int64, device=device)
        rows = {"parents": is_draft - 1, "depths": is_draft, "masks": one << node | 1}
        return cls(**{name: row.repeat(max_reqs, 1) for name, row in rows.items()})

    @property
    def width(self) -> int:
        return int(self.parents.shape[1])


CHECK_RANKS = "VLLM_GRAFT_CHECK_RANKS"
"""Environment variable: 1 compares trees after each step, for which the host waits."""


def is_asked_for() -> bool:
    """Whether the environment asks for the check."""
    return bool(lever(CHECK_RANKS))


def check_trees(tree: TreeState, slots: torch.Tensor, drafts: torch.Tensor) -> None:
    """Compare the trees of a batch over ranks. It waits for the device.

    Ranks verify with their own copy of the topology. If the copies differ, the ranks add up heads
    that saw different keys, and the tokens are wrong without any error. The `slots` are int64
    ``[num_reqs]`` request-state indices, `drafts` int64 ``[num_reqs, num_nodes]`` tokens. Raises
    `GraftError` if a request's tree differs between two ranks."""
    import torch

    topology = [each[slots].long() for each in (tree.parents, tree.depths, tree.masks)]
    ranks = gather_rows(torch.cat([drafts, *topology], dim=1))
    differs = (ranks != ranks[:1]).any(dim=2).nonzero()
    if len(differs):
        rank, row = differs[0].tolist()
        raise GraftError(
            f"tensor-parallel ranks 0 and {rank} drafted different trees for row {row} of a batch "
            f"of {len(slots)} requests, so that their answers would be wrong. Report it with the "
            f"command that you served with; {CHECK_RANKS} is what found it"
        )

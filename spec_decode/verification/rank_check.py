"""A check for debugging: all tensor-parallel ranks have drafted the same trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_graft.base.errors import GraftError
from vllm_graft.base.values import lever
from vllm_graft.seams.ranks import gather_rows

if TYPE_CHECKING:
    from vllm_graft.spec_decode.trees.tree import TreeState

CHECK_RANKS = "VLLM_GRAFT_CHECK_RANKS"
"""Environment variable: 1 compares trees after each step, for which the host waits."""


def is_asked_for() -> bool:
    """Whether the environment asks for the check."""
    return bool(lever(CHECK_RANKS))


def check_trees(tree: TreeState, slots: torch.Tensor, drafts: torch.Tensor) -> None:
    """Compare the trees of a batch over ranks. It waits for the device.

    Ranks verify with their own copy of the topology. If the copies differ, the ranks add up heads
    that saw different keys, and the tokens are wrong without any error. The `slots` are int64
    ``[num_reqs]`` request-state indices, `drafts` int64 ``[num_reqs, num_nodes]`` tokens.

    Raises:
        GraftError: if a request's tree differs between two ranks.
    """
    topology = [each[slots].long() for each in (tree.parents, tree.depths, tree.masks)]
    own = torch.cat([drafts, *topology], dim=1)
    ranks = gather_rows(own)
    differs = (ranks != ranks[:1]).any(dim=2).nonzero()
    if len(differs):
        rank, row = differs[0].tolist()
        raise GraftError(
            f"tensor-parallel ranks 0 and {rank} drafted different trees for row {row} of a batch "
            f"of {len(slots)} requests, so that their answers would be wrong. Report it with the "
            f"command that you served with; {CHECK_RANKS} is what found it"
        )

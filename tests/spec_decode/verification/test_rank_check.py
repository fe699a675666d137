"""The check that ranks drafted the same trees: it says nothing of equal ones, and finds others."""

from __future__ import annotations

import pytest
import torch

from vllm_graft.base.errors import GraftError
from vllm_graft.spec_decode.trees.topology import TreeState
from vllm_graft.spec_decode.verification import rank_check

SLOTS = torch.tensor([3, 0])


def trees() -> tuple[TreeState, torch.Tensor]:
    return TreeState.allocate(4, 3, "cpu"), torch.arange(6).view(2, 3)


def other_rank(
    monkeypatch: pytest.MonkeyPatch, drafts: torch.Tensor, tree: TreeState
) -> list[torch.Tensor]:
    """Let a second rank send its own rows; the rows of this rank are noted."""
    seen: list[torch.Tensor] = []
    topology = [each[SLOTS].long() for each in (tree.parents, tree.depths, tree.masks)]
    peer = torch.cat([drafts, *topology], dim=1)

    def gather(rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows)
        return torch.stack([rows, peer])

    monkeypatch.setattr(rank_check, "gather_rows", gather)
    return seen


def test_a_rank_alone_and_equal_ranks_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, drafts = trees()
    rank_check.check_trees(tree, SLOTS, drafts)
    seen = other_rank(monkeypatch, drafts, tree)
    rank_check.check_trees(tree, SLOTS, drafts)
    assert len(seen) == 1


@pytest.mark.parametrize("what", ["token", "parents", "depths", "masks"])
def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    tree, drafts = trees()
    theirs, others = trees()
    if what == "token":
        others[1, 2] += 1
    else:
        getattr(theirs, what)[0, 2] += 1
    other_rank(monkeypatch, others, theirs)
    message = r"ranks 0 and 1 drafted different trees for row 1 of a batch of 2 requests"
    with pytest.raises(GraftError, match=message):
        rank_check.check_trees(tree, SLOTS, drafts)


def test_slots_of_no_request_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, drafts = trees()
    theirs, others = trees()
    theirs.parents[1] += 1
    other_rank(monkeypatch, others, theirs)
    rank_check.check_trees(tree, SLOTS, drafts)

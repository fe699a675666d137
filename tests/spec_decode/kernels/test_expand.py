from __future__ import annotations

import pytest
import torch

from tests.support.references.tree_reference import (
    expand_frontier_reference,
    seed_frontier_reference,
)
from vllm_graft.spec_decode.kernels.expand import expand_frontier, seed_frontier
from vllm_graft.spec_decode.trees.candidates import CandidateTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def levels(num_reqs: int, topk: int, steps: int, seed: int, ties: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_reqs, topk)] + [(num_reqs * topk, topk)] * (steps - 1)
    logps = [-4 * torch.rand(shape, generator=generator) for shape in shapes]
    logps = [logp.round() if ties else logp for logp in logps]
    return [logp.sort(-1, descending=True).values for logp in logps]


def grow(logps: list[torch.Tensor], reference: bool) -> list[torch.Tensor]:
    """Return every tensor that the expansion writes, after every level."""
    (num_reqs, topk), steps = logps[0].shape, len(logps)
    device = "cpu" if reference else DEVICE
    seed = seed_frontier_reference if reference else seed_frontier
    expand = expand_frontier_reference if reference else expand_frontier
    table = CandidateTable.allocate(num_reqs + 1, topk, steps, device)
    next_tokens = torch.full((num_reqs * topk + 1,), -7, device=device)
    parent_rows = next_tokens.clone()
    written: list[torch.Tensor] = []
    for level, logp in enumerate(logps):
        tokens = (torch.arange(logp.numel()).view(logp.shape) * 31 + level).to(device)
        if level == 0:
            seed(table, logp.to(device), tokens, num_reqs, next_tokens=next_tokens)
        else:
            expand(table, level, logp.to(device), tokens, num_reqs, next_tokens, parent_rows)
        written += [*vars(table).values(), next_tokens, parent_rows]
        written = [tensor.cpu().clone() for tensor in written]
    return written


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("num_reqs", "topk", "steps"),
    [(1, 1, 1), (2, 1, 5), (3, 2, 4), (2, 3, 3), (2, 8, 6), (1, 10, 3), (1, 32, 2)],
)
def test_equals_reference(num_reqs: int, topk: int, steps: int, ties: bool) -> None:
    logps = levels(num_reqs, topk, steps, seed=topk, ties=ties)
    for ours, expected in zip(grow(logps, False), grow(logps, True), strict=True):
        assert torch.equal(ours, expected)


def test_padding_scores() -> None:
    logps = levels(2, 4, 3, seed=0, ties=False)
    logps[0][1, 2:] = float("-inf")
    logps[1][:, 1:] = float("-inf")
    logps[2][3:] = float("-inf")
    for ours, expected in zip(grow(logps, False), grow(logps, True), strict=True):
        assert torch.equal(ours, expected)


def test_frontier_is_the_best_and_ties_go_to_the_lower_index() -> None:
    table = CandidateTable.allocate(1, 2, 2, DEVICE)
    next_tokens = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    parent_rows = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    seed_frontier(
        table,
        torch.tensor([[-1.0, -2.0]], device=DEVICE),
        torch.tensor([[10, 20]], device=DEVICE),
        1,
    )
    expand_frontier(
        table,
        1,
        torch.tensor([[-2.0, -9.0], [-1.0, -1.0]], device=DEVICE),
        torch.tensor([[11, 12], [21, 22]], device=DEVICE),
        1,
        next_tokens,
        parent_rows,
    )
    # The first children of the parents have scores -3, -11, -3 and -3.
    assert table.frontier_candidates.tolist() == [[2, 4]]
    assert next_tokens.tolist() == [11, 21]
    assert parent_rows.tolist() == [0, 1]
    assert table.ancestors.tolist() == [[[0, 2], [1, 3]]]


def test_refuses_a_level_outside_the_table() -> None:
    table = CandidateTable.allocate(1, 2, 2, DEVICE)
    empty = torch.zeros(2, 2, device=DEVICE)
    for level in (0, 2):
        with pytest.raises(ValueError, match=f"level must be 1 to 1, got {level}"):
            expand_frontier(table, level, empty, empty.long(), 1, empty.long(), empty.long())

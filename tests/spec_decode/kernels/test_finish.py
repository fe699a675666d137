"""Candidates grow by levels and become trees."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.crossed import crossed
from tests.support.references.tree_reference import (
    eagle2_tree,
    expand_frontier_reference,
    finish_tree_reference,
    seed_frontier_reference,
)
from vllm_graft.spec_decode.kernels.candidates import expand_frontier, finish_tree, seed_frontier
from vllm_graft.spec_decode.trees.tree import CandidateTable, TreeState, num_candidates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


SIZES = [
    (1, 1, 1, 2),
    (1, 1, 1, 1),
    (4, 1, 3, 2),
    (1, 6, 6, 2),
    (3, 4, 2, 3),
    (4, 3, 36, 2),
    (8, 6, 31, 2),
    (8, 6, 63, 2),
    (10, 7, 63, 2),
    (32, 2, 63, 2),
    (16, 7, 63, 2),
    (1, 63, 63, 2),
]


def random_levels(
    num_reqs: int, topk: int, steps: int, seed: int, quantum: float
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_reqs, topk)] + [(num_reqs * topk, topk)] * (steps - 1)
    logps = [-4 * torch.rand(shape, generator=generator) for shape in shapes]
    return [(logp / quantum).round() * quantum if quantum else logp for logp in logps]


def grown(logps: list[torch.Tensor]) -> CandidateTable:
    """Candidate ``i`` of batch row ``r`` has token ``1000 * r + i``."""
    (num_reqs, topk), steps = logps[0].shape, len(logps)
    table = CandidateTable.allocate(num_reqs, topk, steps, DEVICE)
    rows = torch.zeros(num_reqs * topk, dtype=torch.int64, device=DEVICE)
    for level, logp in enumerate(logps):
        tokens = torch.zeros(logp.shape, dtype=torch.int64, device=DEVICE)
        if level == 0:
            seed_frontier(table, logp.to(DEVICE), tokens, num_reqs)
        else:
            expand_frontier(table, level, logp.to(DEVICE), tokens, num_reqs, rows, rows.clone())
    ids = torch.arange(table.tokens.shape[1], device=DEVICE)
    table.tokens.copy_(ids + 1000 * torch.arange(num_reqs, device=DEVICE)[:, None])
    return table


def on_cpu(table: CandidateTable) -> CandidateTable:
    return CandidateTable(**{name: tensor.cpu() for name, tensor in vars(table).items()})


def finish(table: CandidateTable, steps: int, nodes: int, reference: bool) -> list[torch.Tensor]:
    device = "cpu" if reference else DEVICE
    num_reqs = table.scores.shape[0]
    tree = TreeState.allocate(num_reqs + 3, nodes, device)
    drafts = torch.full((num_reqs + 1, nodes + 2), -7, device=device)
    slots = torch.arange(num_reqs, device=device).flip(0) + 2
    run = finish_tree_reference if reference else finish_tree
    table = on_cpu(table) if reference else table
    run(table, num_reqs, steps, nodes, slots, tree, drafts)
    return [tensor.cpu() for tensor in (*vars(tree).values(), drafts)]


@pytest.mark.parametrize(("sizes", "quantum"), crossed(SIZES, [0.0, 1.0]))
def test_equals_reference(sizes: tuple[int, int, int, int], quantum: float) -> None:
    topk, steps, nodes, num_reqs = sizes
    table = grown(random_levels(num_reqs, topk, steps, topk + steps, quantum))
    ours = finish(table, steps, nodes, reference=False)
    expected = finish(table, steps, nodes, reference=True)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_fewer_steps_than_the_table_has() -> None:
    table = grown(random_levels(2, 3, 4, 0, 0.0))
    ours = finish(table, 2, 5, reference=False)
    expected = finish(table, 2, 5, reference=True)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_last_mask_bit_is_the_sign() -> None:
    table = grown(random_levels(1, 1, 63, 0, 0.0))
    masks = finish(table, 63, 63, reference=False)[2]
    assert masks[2, 63] == -1
    assert masks[2, 62] == (1 << 63) - 1


def test_padding_of_a_graph_leaves_the_tree_alone() -> None:
    table = grown(random_levels(2, 2, 2, 0, 0.0))
    tree = TreeState.allocate(3, 3, DEVICE)
    tree.parents.fill_(9)
    tree.masks.fill_(9)
    drafts = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    finish_tree(table, 2, 2, 3, torch.tensor([1, -1], device=DEVICE), tree, drafts)
    assert not tree.parents[1].eq(9).any()
    assert tree.parents[[0, 2]].eq(9).all()
    assert tree.masks[[0, 2]].eq(9).all()


def test_each_node_is_some_candidate_whatever_the_scores() -> None:
    """The scores of a graph's padding may be anything; the chosen candidates must exist."""
    table = grown(random_levels(1, 4, 3, 0, 0.0))
    table.scores[0, ::3] = float("nan")
    table.scores[0, 1::3] = float("-inf")
    drafts = finish(table, 3, 31, reference=False)[-1][0, :31].tolist()
    assert len(set(drafts)) == 31
    assert set(drafts) <= set(range(num_candidates(4, 3)))


def test_refuses_more_nodes_than_candidates() -> None:
    table = grown(random_levels(1, 2, 2, 0, 0.0))
    tree = TreeState.allocate(1, 7, DEVICE)
    slot = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    drafts = torch.zeros(1, 7, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"num_nodes must be 1 to 6 .* got 7"):
        finish_tree(table, 1, 2, 7, slot, tree, drafts)
    with pytest.raises(ValueError, match="1 to 63 draft nodes"):
        TreeState.allocate(1, 64, DEVICE)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_is_eagle2(data: st.DataObject) -> None:
    topk = data.draw(st.integers(1, 5))
    steps = data.draw(st.integers(1, 4))
    nodes = data.draw(st.integers(1, min(63, num_candidates(topk, steps))))
    quantum = data.draw(st.sampled_from([0.0, 0.5, 2.0]))
    logps = random_levels(2, topk, steps, data.draw(st.integers(0, 1 << 20)), quantum)
    parents, depths, _, drafts = finish(grown(logps), steps, nodes, reference=False)
    for r in range(2):
        mine = [logps[0][r]] + [logp[r * topk : (r + 1) * topk] for logp in logps[1:]]
        expected = eagle2_tree(mine, nodes)
        slot = 3 - r
        assert drafts[r, :nodes].tolist() == [1000 * r + node.candidate for node in expected]
        assert parents[slot].tolist() == [-1, *(node.parent for node in expected)]
        assert depths[slot].tolist() == [0, *(node.depth for node in expected)]
        assert all(parent < node for node, parent in enumerate(parents[slot].tolist()))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 20), quantum=st.sampled_from([0.0, 0.5]))
def test_any_prefix_is_the_best_tree_of_its_size(seed: int, quantum: float) -> None:
    topk, steps = 2, 3
    logps = random_levels(1, topk, steps, seed, quantum)
    table = grown(logps)
    scores, parents = table.scores[0].tolist(), table.parents[0].tolist()
    drafts = finish(table, steps, len(scores), reference=False)[3][0]
    for size in range(1, len(scores) + 1):
        # The sum of the nodes' probabilities is the expected number of accepted tokens.
        best = max(
            sum(2.718281828 ** scores[i] for i in subset)
            for subset in combinations(range(len(scores)), size)
            if all(parents[i] < 0 or parents[i] in subset for i in subset)
        )
        prefix = drafts[:size].tolist()
        assert all(parents[i] < 0 or parents[i] in prefix for i in prefix)
        assert sum(2.718281828 ** scores[i] for i in prefix) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("nodes", [1, 7, 63])
def test_before_a_tree_is_drafted_every_draft_is_a_child_of_the_root(nodes: int) -> None:
    tree = TreeState.allocate(2, nodes, DEVICE)
    for slot in range(2):
        assert tree.parents[slot].tolist() == [-1] + [0] * nodes
        assert tree.depths[slot].tolist() == [0] + [1] * nodes
        # A node's bits are its own and its parent's, as in a tree that was drafted.
        bits = [{j for j in range(64) if int(mask) >> j & 1} for mask in tree.masks[slot]]
        assert bits == [{0}, *({0, node} for node in range(1, nodes + 1))]
    assert [part.dtype for part in (tree.parents, tree.depths)] == [torch.int32] * 2
    assert tree.masks.dtype == torch.int64
    tree.masks[0] = 5
    assert tree.masks[1, 0] == 1, "slots are apart"


@pytest.mark.parametrize("nodes", [2, 12, 20])
def test_candidates_behind_the_levels(nodes: int) -> None:
    """A path of another source is deeper than the levels."""
    extra, levels = 30, 2
    first = num_candidates(4, levels)
    plain = grown(random_levels(3, 4, 4, 1, 0.0))
    tables = []
    for device in (DEVICE, "cpu"):
        table = CandidateTable.allocate(3, 4, 4, device, extra=extra)
        for name in ("scores", "tokens", "parents"):
            getattr(table, name)[:, :first] = getattr(plain, name)[:, :first].to(device)
        place = torch.arange(extra, device=device)
        table.scores[:, first : first + extra] = -0.05 * (place + 1)
        table.scores[1, first + 5 : first + extra] = float("-inf")
        table.tokens[:, first : first + extra] = 7000 + place
        table.parents[:, first : first + extra] = first + place - 1
        table.parents[:, first] = 1
        table.scores[:, 1] = -0.01
        tables.append(table)
    results = []
    for table, run in zip(tables, (finish_tree, finish_tree_reference)):
        device = table.scores.device
        tree = TreeState.allocate(4, nodes, device)
        drafts = torch.zeros(3, nodes, dtype=torch.int64, device=device)
        bits = torch.full((4,), -7, device=device)
        slots = torch.tensor([2, 0, 1], device=device)
        run(
            table, 3, levels, nodes, slots, tree, drafts,
            num_extra=extra, extra_nodes=bits,
        )  # fmt: skip
        results.append([each.tolist() for each in (*vars(tree).values(), drafts, bits)])
    assert results[0] == results[1]
    bits = results[0][-1]
    assert bits[3] == -7
    assert min(bits[:3]) > 0
    if nodes > 12:
        assert max(results[0][1][2]) > levels + 5


def test_more_other_candidates_than_columns_are_refused() -> None:
    table = CandidateTable.allocate(1, 2, 2, DEVICE, extra=3)
    tree, slots = TreeState.allocate(1, 2, DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    drafts = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="num_extra must be 0 to 3"):
            finish_tree(table, 1, 2, 2, slots, tree, drafts, num_extra=wrong)


def levels(num_reqs: int, topk: int, steps: int, seed: int, ties: bool) -> list[torch.Tensor]:
    found = random_levels(num_reqs, topk, steps, seed, quantum=float(ties))
    return [logp.sort(-1, descending=True).values for logp in found]


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
def test_levels_equals_reference(num_reqs: int, topk: int, steps: int, ties: bool) -> None:
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

"""Nodes that are dropped: which ones, what is left of them, and that no path leads there."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.spec_decode.kernels.test_finish import DEVICE, grown, random_levels
from tests.spec_decode.kernels.test_walk import walk
from tests.support.references.tree_reference import finish_tree_reference
from vllm_graft.spec_decode.kernels.candidates import finish_tree
from vllm_graft.spec_decode.kernels.verify import TreeRows, prepare_rows
from vllm_graft.spec_decode.trees.tree import CandidateTable, DropState, TreeState

PRICES = [(0.0, 0.0), (0.7, -0.2), (3.0, -0.065), (20.0, -0.01), (40.0, -1.0), (1e6, -0.1)]


def dropped(
    table: CandidateTable, steps: int, nodes: int, price: tuple[float, float], *, reference: bool
) -> list[torch.Tensor]:
    """Parents, depths, masks and drafts of the trees of a table."""
    count = table.scores.shape[0]
    tree = TreeState.allocate(count, nodes, DEVICE)
    drafts = torch.zeros(count, nodes, dtype=torch.int64, device=DEVICE)
    run = finish_tree_reference if reference else finish_tree
    slots = torch.arange(count, device=DEVICE)
    run(table, count, steps, nodes, slots, tree, drafts, price=torch.tensor(price, device=DEVICE))
    return [*vars(tree).values(), drafts]


@pytest.mark.parametrize("sizes", [(4, 3, 14, 3), (1, 7, 7, 2), (8, 6, 63, 2), (2, 1, 1, 2)])
@pytest.mark.parametrize("price", PRICES)
def test_equals_reference(sizes: tuple[int, int, int, int], price: tuple[float, float]) -> None:
    topk, steps, nodes, count = sizes
    nodes = min(nodes, topk + (steps - 1) * topk**2)
    table = grown(random_levels(count, topk, steps, topk, 0.0))
    ours = dropped(table, steps, nodes, price, reference=False)
    theirs = dropped(table, steps, nodes, price, reference=True)
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.equal(mine, expected)


def test_without_a_price_nothing_is_dropped() -> None:
    """Even nodes without any chance stay: the step is as it is without the key."""
    table = grown(random_levels(2, 4, 3, 0, 0.0))
    table.scores[0, 3:] = -math.inf
    tree = TreeState.allocate(2, 14, DEVICE)
    drafts = torch.zeros(2, 14, dtype=torch.int64, device=DEVICE)
    finish_tree(table, 2, 3, 14, torch.arange(2, device=DEVICE), tree, drafts)
    priced = dropped(table, 3, 14, (0.0, 0.0), reference=False)
    for mine, expected in zip([*vars(tree).values(), drafts], priced, strict=True):
        assert torch.equal(mine, expected)


def test_each_request_by_its_own_scores() -> None:
    """A tree of a request is the same whoever is beside it."""
    levels = random_levels(2, 4, 3, 5, 0.0)
    for each in levels:  # The second request is far more certain.
        each[len(each) // 2 :, 0] = -0.01
    table, price = grown(levels), (1.5, -0.3)
    swapped = CandidateTable(**{name: each.flip(0) for name, each in vars(table).items()})
    here = dropped(table, 3, 14, price, reference=False)
    there = dropped(swapped, 3, 14, price, reference=False)
    for mine, other in zip(here, there, strict=True):
        assert torch.equal(mine, other.flip(0))
    kept = (here[-1] >= 0).sum(1)
    assert 0 < kept[0] < kept[1] - 3
    # Negative control: each is dropped by the scores of the one beside it.
    wrong = CandidateTable(**vars(table) | {"scores": table.scores.flip(0)})
    found = (dropped(wrong, 3, 14, price, reference=False)[-1] >= 0).sum(1)
    assert not torch.equal(found, kept)


def test_a_dropped_node_is_the_root_once_more() -> None:
    levels = random_levels(2, 4, 3, 3, 0.0)
    for each in levels:
        each[:, 0] = -0.3
    price = 60.0, -0.01
    parents, depths, masks, drafts = dropped(grown(levels), 3, 14, price, reference=False)
    tree, drop = TreeState(parents, depths, masks), DropState.allocate(torch.device(DEVICE))
    kept = (drafts >= 0).sum(1)
    assert (kept > 0).all()
    assert (kept < 14).all()
    roots, rows = torch.tensor([[71], [72]], device=DEVICE), TreeRows.allocate(2, 64, DEVICE)
    ints = {"dtype": torch.int32, "device": DEVICE}
    batch = SimpleNamespace(
        idx_mapping=torch.arange(2, device=DEVICE),
        query_start_loc=torch.tensor([0, 15, 30], **ints),
        cu_num_logits=torch.tensor([0, 15, 30], **ints),
        input_ids=torch.cat([roots, drafts], 1).flatten().int(),
        positions=torch.zeros(30, dtype=torch.int64, device=DEVICE),
        num_reqs=2,
        num_reqs_after_padding=2,
    )
    computed = torch.tensor([100, 200], **ints)
    prepare_rows(tree, batch, computed, rows, drop=drop)
    ids, positions = batch.input_ids.view(2, 15), batch.positions.view(2, 15)
    for request, (root, base) in enumerate([(71, 100), (72, 200)]):
        first = int(kept[request]) + 1
        assert (ids[request, first:] == root).all()
        assert (positions[request, first:] == base).all()
        assert (ids[request, 1:first] == drafts[request, : first - 1]).all()
        assert (positions[request, 1:first] > base).all()
        own = rows.row_masks.view(-1)[15 * request + first : 15 * request + 15].tolist()
        assert own == [1 << node for node in range(first, 15)]
    assert int(drop.kept) == int(kept.sum())
    assert int(drop.told) == 0
    prepare_rows(tree, batch, computed, rows, drop=drop)
    assert int(drop.told) == int(kept.sum())


def test_no_path_leads_to_a_dropped_node() -> None:
    """A target that repeats the root's token at each row does not follow the root's copies."""
    drafts, targets = [[7, 8, 7, 7]], [[7, 7, 7, 7]]
    assert walk([[-1, 0, -1, -1]], drafts, targets) == ([[7]], [[0]])
    # Negative control: as children of the root they would be followed.
    assert walk([[-1, 0, 0, 0]], drafts, targets) == ([[7, 7]], [[0, 2]])

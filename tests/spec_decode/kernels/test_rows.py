from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.references.tree_reference import prepare_rows_reference
from vllm_graft.spec_decode.kernels.rows import TreeRows, prepare_rows
from vllm_graft.spec_decode.targets.dense.samples import random_masks
from vllm_graft.spec_decode.trees.topology import TreeState

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prepare(
    lengths: list[int],
    drafts: list[int],
    nodes: int,
    reference: bool,
    padding: int = 0,
    **options: int | bool,
) -> dict[str, torch.Tensor]:
    device = "cpu" if reference else DEVICE
    generator = torch.Generator().manual_seed(len(lengths))
    num_reqs = len(lengths)
    tree = TreeState.allocate(num_reqs + 2, nodes, device)
    for slot in range(num_reqs + 2):
        masks = random_masks(nodes + 1, generator)
        tree.masks[slot] = masks
        tree.parents[slot] = torch.tensor(
            [(int(mask) & ((1 << node) - 1)).bit_length() - 1 for node, mask in enumerate(masks)]
        )
        tree.depths[slot] = torch.tensor([int(m).bit_count() - 1 if m >= 0 else 9 for m in masks])
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    num_computed = torch.arange(num_reqs + 2, dtype=torch.int32, device=device) * 100 + 7
    width = num_reqs + padding + 1
    rows = TreeRows.allocate(width, sum(lengths) + 3, device)
    positions = torch.full((sum(lengths) + 3,), -7, device=device)
    tensors = {**vars(rows), "positions": positions}
    for tensor in tensors.values():
        tensor.fill_(-7)
    batch = SimpleNamespace(
        idx_mapping=torch.arange(num_reqs, device=device).flip(0) + 2,
        query_start_loc=starts,
        cu_num_logits=torch.tensor([0, *(count + 1 for count in drafts)])
        .cumsum(0)
        .to(device, torch.int32),
        positions=positions,
        num_reqs=num_reqs,
        num_reqs_after_padding=num_reqs + padding,
    )
    run = prepare_rows_reference if reference else prepare_rows
    run(tree, batch, num_computed, rows, **options)
    return {name: tensor.cpu() for name, tensor in tensors.items()}


CASES = [
    ([1], [0], 1),
    ([8], [7], 7),
    ([64], [63], 63),
    ([64, 4, 64], [63, 3, 20], 63),
    ([5, 1, 3, 70, 64, 65, 6], [4, 0, 2, 0, 0, 0, 2], 7),
]


@pytest.mark.parametrize("plain_rows", [False, True])
@pytest.mark.parametrize(("lengths", "drafts", "nodes"), CASES)
def test_equals_reference(
    lengths: list[int], drafts: list[int], nodes: int, plain_rows: bool
) -> None:
    options = {"padding": 2, "plain_rows": plain_rows}
    ours = prepare(lengths, drafts, nodes, reference=False, **options)
    expected = prepare(lengths, drafts, nodes, reference=True, **options)
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


def test_plain_rows_up_to_a_bound() -> None:
    rows = prepare([3, 4, 5], [0, 0, 4], 4, reference=False, plain_rows=True, max_rows=3)
    assert rows["num_rows"][:3].tolist() == [3, 0, 5]
    # The state indices are 4, 3 and 2.
    assert rows["prefix_lens"][:3].tolist() == [407, 0, 207]
    assert rows["row_masks"][:7].tolist() == [1, 3, 7, -7, -7, -7, -7]


def test_only_tree_rows_get_new_positions() -> None:
    rows = prepare([6, 2], [3, 0], 3, reference=False, padding=1)
    assert rows["positions"][[0, 1]].tolist() == [-7, -7]
    # State index 3 has 307 computed tokens, and two query rows before the root.
    assert rows["positions"][2] == 309
    assert rows["positions"][6:].eq(-7).all()
    assert rows["num_rows"].tolist() == [4, 0, 0, -7]
    assert rows["prefix_lens"].tolist() == [309, 0, 0, -7]


def test_keys_that_the_stock_back_end_has_to_see() -> None:
    rows = prepare([4, 6, 2], [3, 3, 0], 3, reference=False, padding=1)
    # The first has none, as all its rows are a tree's; the others have state indices 3 and 2.
    assert rows["plain_lens"].tolist() == [0, 313, 209, 0, -7]


def test_cut_tree_sees_no_row_behind_its_own() -> None:
    whole = prepare([64], [63], 63, reference=False)["row_masks"]
    cut = prepare([10], [9], 63, reference=False)["row_masks"]
    assert torch.equal(cut[:10], whole[:10])
    assert (cut[:10] < 1 << 10).all()


def test_rows_know_which_row_they_continue() -> None:
    rows = prepare([2, 5, 9], [0, 3, 0], 3, reference=False, max_rows=4)
    # Before the root of the second request lies one plain row; the third is a longer query.
    assert rows["row_parents"][:4].tolist() == [-1, 0, -7, 0]
    assert all(1 <= parent < 4 for parent in rows["row_parents"][4:7].tolist())
    assert rows["row_parents"][7:].eq(-7).all()

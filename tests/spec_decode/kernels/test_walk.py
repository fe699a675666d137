"""Rows of trees before the target, and the walk behind it."""

from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from tests.support.references.tree_reference import prepare_rows_reference, walk_tree_reference
from vllm_graft.spec_decode.kernels.verify import TreeRows, prepare_rows, walk_tree
from vllm_graft.spec_decode.targets.dense.two_pass import random_masks
from vllm_graft.spec_decode.trees.tree import TreeState

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def walk(
    parents: list[list[int]],
    drafts: list[list[int]],
    targets: list[list[int]],
    reference: bool = False,
    prefill: list[bool] | None = None,
    emitted: torch.Tensor | None = None,
    **options: torch.Tensor,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return emitted tokens and path of each request; ``drafts[r][0]`` is the root's token."""
    device = "cpu" if reference else DEVICE
    num_reqs, width = len(parents), max(map(len, parents))
    tree = TreeState.allocate(num_reqs + 1, max(width - 1, 1), device)
    for r, nodes in enumerate(parents):
        tree.parents[num_reqs - r, : len(nodes)] = torch.tensor(nodes)
    sampled = torch.full((num_reqs, width), -7, device=device)
    path = torch.full((num_reqs + 1, width), -7, dtype=torch.int32, device=device)
    num_sampled = torch.full((num_reqs,), -7, dtype=torch.int32, device=device)
    run = walk_tree_reference if reference else walk_tree
    run(
        torch.tensor([*chain.from_iterable(targets)], device=device),
        torch.tensor([*chain.from_iterable(drafts)], device=device),
        torch.tensor([0, *map(len, targets)]).cumsum(0).to(device, torch.int32),
        num_reqs - torch.arange(num_reqs, device=device),
        tree,
        sampled,
        path,
        num_sampled,
        *prompts(prefill, [len(each) for each in targets], device),
        emitted,
        **options,
    )
    counts = num_sampled.tolist()
    for r, count in enumerate(counts):
        assert (sampled[r, count:] == 0).all()
        assert (path[r, count:] == -7).all()
    return (
        [sampled[r, :count].tolist() for r, count in enumerate(counts)],
        [path[r, :count].tolist() for r, count in enumerate(counts)],
    )


def prompts(
    unfinished: list[bool] | None, rows: list[int], device: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Make positions of rows and prompt lengths by slot; these roots are in their prompt."""
    if unfinished is None:
        return None, None
    first = [20 + r for r in range(len(rows))]
    lengths = [position + inside for position, inside in zip(first, unfinished)]
    positions = [position + i for position, count in zip(first, rows) for i in range(count)]
    by_slot = torch.tensor([0, *reversed(lengths)], dtype=torch.int32, device=device)
    return torch.tensor(positions, device=device), by_slot


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("rows", [[1], [2, 1, 3], [64], [64, 5, 32, 17, 1, 8]])
def test_equals_reference(rows: list[int], prefill: bool) -> None:
    generator = torch.Generator().manual_seed(sum(rows))

    def draw(high: int, count: int) -> list[int]:
        return torch.randint(0, high, (count,), generator=generator).tolist()

    width = max(rows)
    parents = [[-1] + [draw(node, 1)[0] for node in range(1, width)] for _ in rows]
    drafts = [draw(3, count) for count in rows]
    targets = [draw(3, count) for count in rows]
    flags = [bool(flag) for flag in draw(2, len(rows))] if prefill else None
    assert walk(parents, drafts, targets, False, flags) == walk(
        parents, drafts, targets, True, flags
    )


#     0 -> 1 -> 3 -> 4
#       -> 2 -> 5
PARENTS = [-1, 0, 0, 1, 3, 2]
DRAFTS = [0, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    ("targets", "tokens", "path"),
    [
        ([99, 0, 0, 0, 0, 0], [99], [0]),
        ([12, 0, 15, 0, 0, 77], [12, 15, 77], [0, 2, 5]),
        ([11, 13, 0, 14, 66, 0], [11, 13, 14, 66], [0, 1, 3, 4]),
        # 15 is a draft, but not a child of node 1.
        ([11, 15, 0, 0, 0, 0], [11, 15], [0, 1]),
    ],
)
def test_follows_children_only(targets: list[int], tokens: list[int], path: list[int]) -> None:
    assert walk([PARENTS], [DRAFTS], [targets]) == ([tokens], [path])


def test_other_parents_give_another_path() -> None:
    targets = [11, 13, 0, 14, 66, 0]
    assert walk([[-1, 0, 0, 0, 3, 2]], [DRAFTS], [targets]) == ([[11, 13]], [[0, 1]])


def test_lowest_of_equal_siblings() -> None:
    assert walk([[-1, 0, 0]], [[0, 5, 5]], [[5, 6, 7]]) == ([[5, 6]], [[0, 1]])


def test_invalid_draft_is_never_accepted() -> None:
    assert walk([[-1, 0]], [[0, -1]], [[5, 6]]) == ([[5]], [[0]])
    assert walk([[-1, 0]], [[0, -1]], [[-1, 6]]) == ([[-1]], [[0]])


def test_nodes_without_a_row_take_no_part() -> None:
    assert walk([PARENTS], [DRAFTS[:3]], [[11, 13, 0]]) == ([[11, 13]], [[0, 1]])


def test_whole_chain_of_63() -> None:
    parents = list(range(-1, 63))
    drafts = list(range(64))
    assert walk([parents], [drafts], [list(range(1, 65))]) == (
        [list(range(1, 65))],
        [list(range(64))],
    )


def test_root_in_prefill_emits_one_token() -> None:
    targets = [11, 13, 0, 14, 66, 0]
    sampled, _ = walk([PARENTS] * 2, [DRAFTS] * 2, [targets] * 2, prefill=[True, False])
    assert sampled == [[11], [11, 13, 14, 66]]


@pytest.mark.parametrize("reference", [False, True])
def test_emitted_tokens_are_counted(reference: bool) -> None:
    emitted = torch.zeros(100, dtype=torch.int32, device="cpu" if reference else DEVICE)
    emitted[5] = 3
    parents, drafts = [PARENTS, PARENTS[:2]], [DRAFTS, DRAFTS[:2]]
    targets = [[11, 13, 0, 14, 66, 0], [11, 66]]
    for prefill in (None, [False, True]):
        walk(parents, drafts, targets, reference, prefill, emitted)
    # The second request of the second call emits the root's token alone.
    expected = {5: 3, 11: 4, 13: 2, 14: 2, 66: 3}
    assert {t: int(n) for t, n in enumerate(emitted) if n} == expected


def test_no_token_is_not_counted() -> None:
    emitted = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    walk([[-1]], [[0]], [[-1]], emitted=emitted[1:])
    assert not emitted.any()


def test_tokens_of_requests_that_do_not_teach_are_not_counted() -> None:
    emitted = torch.zeros(100, dtype=torch.int32, device=DEVICE)
    # Slot 2 is that of the first request, slot 1 that of the second.
    teaches = torch.tensor([1, 1, 0], dtype=torch.int32, device=DEVICE)
    parents, drafts = [PARENTS, PARENTS[:2]], [DRAFTS, DRAFTS[:2]]
    targets = [[11, 13, 0, 14, 66, 0], [11, 67]]
    taught = walk(parents, drafts, targets, emitted=emitted, teaches=teaches)
    assert {t: int(n) for t, n in enumerate(emitted) if n} == {11: 1, 67: 1}
    assert taught == walk(parents, drafts, targets)


@pytest.mark.parametrize("prefill", [False, True])
def test_nodes_of_other_sources_are_counted(prefill: bool) -> None:
    generator = torch.Generator().manual_seed(4)

    def draw(high: int, *size: int) -> torch.Tensor:
        return torch.randint(0, high, size, generator=generator)

    rows, width = [64, 5, 1, 17], 64
    tree = TreeState.allocate(5, 63, DEVICE)
    for slot in range(5):
        tree.parents[slot] = torch.tensor([-1, *(int(draw(n, 1)) for n in range(1, width))])
    drafts, targets = draw(2, sum(rows)), draw(2, sum(rows))
    drafts[3] = -1
    bits = draw(2**62, 5) * 2
    positions = draw(9, sum(rows)) + 20
    lengths = torch.full((5,), 24 if prefill else 0, dtype=torch.int32)
    counts = []
    for run, device in ((walk_tree, DEVICE), (walk_tree_reference, "cpu")):
        found = torch.tensor([100, 200], device=device)
        run(
            targets.to(device),
            drafts.to(device),
            torch.tensor([0, *rows]).cumsum(0).to(device, torch.int32),
            torch.tensor([3, 1, 0, 4], device=device),
            TreeState(*(each.to(device) for each in vars(tree).values())),
            torch.zeros(4, width, dtype=torch.int64, device=device),
            torch.zeros(4, width, dtype=torch.int32, device=device),
            torch.zeros(4, dtype=torch.int32, device=device),
            positions.to(device),
            lengths.to(device),
            extra_nodes=bits.to(device),
            extra_counts=found,
        )
        counts.append(found.tolist())
    assert counts[0] == counts[1]
    assert counts[0][0] > 100
    assert 200 < counts[0][1] < counts[0][0] + 100


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
def test_rows_equals_reference(
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

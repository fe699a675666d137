from __future__ import annotations

from itertools import chain

import pytest
import torch

from tests.support.references.tree_reference import walk_tree_reference
from vllm_graft.spec_decode.kernels.walk import walk_tree
from vllm_graft.spec_decode.trees.topology import TreeState

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
    """Make positions of rows and prompt lengths by slot, so that these roots are in their prompt.

    Other roots are at the first position after their prompt.
    """
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

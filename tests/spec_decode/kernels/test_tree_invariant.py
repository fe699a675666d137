"""Parents come before children, in each tree that is made, and in each cut of it: all small cases.

Every tree comes from a table of candidates by `finish_tree`. Levels, blocks and n-grams put into it
what has no better score than its parent, and stands behind it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from vllm_graft.spec_decode.grammars.tree_grammars import pack, unpack
from vllm_graft.spec_decode.kernels.candidates import finish_tree
from vllm_graft.spec_decode.kernels.ngram_insert import insert_ngrams, insert_paths
from vllm_graft.spec_decode.kernels.ngram_match import match_ngrams
from vllm_graft.spec_decode.trees.text_state import NgramState
from vllm_graft.spec_decode.trees.tree import CandidateTable, TreeState

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOPK, OTHERS = 3, 2


def check(tree: TreeState, drafts: torch.Tensor, nodes: int) -> None:
    """Check all trees of a state, and each that vLLM or a graph's size may cut from one."""
    rows = zip(*(each.tolist() for each in (tree.parents, tree.depths, tree.masks)), strict=True)
    packed = pack(drafts[:, :nodes], tree.parents[:, 1 : nodes + 1]).tolist()
    for (parents, depths, masks), tokens, sent in zip(rows, drafts.tolist(), packed, strict=True):
        assert (parents[0], depths[0], masks[0]) == (-1, 0, 1)
        for node in range(1, nodes + 1):
            parent = parents[node]
            assert 0 <= parent < node
            assert depths[node] == depths[parent] + 1
            assert masks[node] == masks[parent] | 1 << node
        children = [(parents[node], tokens[node - 1]) for node in range(1, nodes + 1)]
        assert len(set(children)) == nodes
        for cut in range(1, nodes + 1):
            found = unpack(sent[:cut])
            assert list(found.parents) == parents[: cut + 1]
            assert list(found.tokens)[1:] == tokens[:cut]


def forms(deltas: Sequence[float], others: Sequence[float]) -> Iterator[tuple[Any, Any]]:
    """Yield parents and scores of tables: three children of the root, two candidates anywhere."""
    places = [range(-1, TOPK + place) for place in range(OTHERS)]
    for parents in itertools.product(*places):
        whole = [*[-1] * TOPK, *parents]
        for given in itertools.product(*[deltas] * TOPK, *[others] * OTHERS):
            scores: list[float] = []
            for parent, delta in zip(whole, given, strict=True):
                scores.append((scores[parent] if parent >= 0 else 0.0) + delta)
            yield whole, scores


def finished(tables: list[tuple[Any, Any]]) -> tuple[TreeState, torch.Tensor]:
    """The trees of such tables, each candidate with a token of its own."""
    count, width = len(tables), TOPK + OTHERS
    table = CandidateTable.allocate(count, TOPK, 1, DEVICE, extra=OTHERS)
    table.parents.copy_(torch.tensor([parents for parents, _ in tables]))
    table.scores.copy_(torch.tensor([scores for _, scores in tables]))
    table.tokens.copy_(torch.arange(width).expand(count, -1))
    tree = TreeState.allocate(count, TOPK, DEVICE)
    drafts = torch.full((count, TOPK), -1, device=DEVICE)
    extra = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    slots = torch.arange(count, device=DEVICE)
    finish_tree(table, count, 1, TOPK, slots, tree, drafts, num_extra=OTHERS, extra_nodes=extra)
    return tree, drafts


@pytest.mark.parametrize(
    "others", [(0.0, -math.inf), pytest.param((0.0, -1.0, -math.inf), marks=pytest.mark.nightly)]
)
def test_all_small_tables(others: tuple[float, ...]) -> None:
    """Equal scores too, where the index decides, and columns without a candidate."""
    tables = list(forms((0.0, -1.0), others))
    assert len(tables) == 4 * 5 * 2**3 * len(others) ** 2
    check(*finished(tables), TOPK)


def test_a_child_that_is_better_than_its_parent_is_seen() -> None:
    """Negative control: such a table makes a tree whose child comes before its parent."""
    with pytest.raises(AssertionError):
        check(*finished(list(forms((-1.0,), (1.0,)))), TOPK)


LETTERS = 3
LENGTHS = pytest.mark.parametrize("length", [5, pytest.param(6, marks=pytest.mark.nightly)])


def matched(
    matches: int, length: int
) -> tuple[NgramState, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The matches in all texts of so many letters, with their lengths and slots."""
    texts = torch.tensor(list(itertools.product(range(LETTERS), repeat=length)), device=DEVICE)
    texts = texts[: len(texts) // LETTERS].int()
    count = len(texts)
    state = NgramState.allocate(1, 3, count, length + 2, DEVICE, matches)
    source = torch.zeros(count, length + 2, dtype=torch.int32, device=DEVICE)
    source[:, :length] = texts
    total = torch.full((count,), length, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(count, device=DEVICE)
    match_ngrams(state, source, total, slots, count)
    return state, total, slots, texts


@LENGTHS
@pytest.mark.parametrize("rate", [1.0, pytest.param(0.5, marks=pytest.mark.nightly)])
def test_n_grams_beside_drafts_of_all_small_texts(rate: float, length: int) -> None:
    """A path has the score of its first token all along if the rate is 1."""
    state, total, slots, texts = matched(1, length)
    state.rates.fill_(rate)
    count, topk, depth = len(texts), 2, 4
    table = CandidateTable.allocate(count, topk, 2, DEVICE, extra=depth)
    # The draft's candidates: letters below the root, and below each of them.
    table.tokens[:, : topk + topk**2] = torch.tensor([0, 1, 1, 2, 0, 1])
    table.parents[:, : topk + topk**2] = torch.tensor([-1, -1, 0, 0, 1, 1])
    table.scores[:, : topk + topk**2] = torch.tensor([-0.2, -0.9, -0.2, -1.4, -0.9, -2.0])
    table.frontier_candidates[:] = torch.tensor([0, 1])
    first = topk + topk**2
    insert_ngrams(
        table, state, total, slots, count, levels=2, first=first, depth=depth, vocab_size=LETTERS
    )
    tree = TreeState.allocate(count, first, DEVICE)
    drafts = torch.full((count, first), -1, device=DEVICE)
    extra = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    finish_tree(table, count, 2, first, slots, tree, drafts, num_extra=depth, extra_nodes=extra)
    check(tree, drafts, first)
    # Many texts have a match, and put nodes of its path into their trees.
    assert (extra != 0).sum() > count // 3


def test_a_node_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 63"):
        TreeState.allocate(1, 64, "cpu")
    table = CandidateTable.allocate(1, 9, 2, "cpu")
    tree = TreeState.allocate(1, 63, "cpu")
    drafts = torch.zeros(1, 64, dtype=torch.int64)
    with pytest.raises(ValueError, match="1 to 63"):
        finish_tree(table, 1, 2, 64, torch.zeros(1, dtype=torch.int64), tree, drafts)


@LENGTHS
def test_trees_of_n_grams_alone_of_all_small_texts(length: int) -> None:
    """Each candidate stands behind its parent, and has no better score."""
    state, total, slots, texts = matched(2, length)
    count, depth = len(texts), 3
    table = CandidateTable.allocate(count, 1, 1, DEVICE, extra=2 * depth)
    table.scores[:, :1] = -math.inf
    insert_paths(table, state, total, slots, count, first=1, depth=depth, vocab_size=LETTERS)
    found = 0
    for scores, parents in zip(table.scores.tolist(), table.parents.tolist(), strict=True):
        for column in range(1, 1 + 2 * depth):
            if scores[column] > -math.inf:
                found += 1
                assert parents[column] < column
                assert parents[column] < 0 or scores[column] <= scores[parents[column]]
    assert found > count

"""The nodes that several matches of a text have in a table, beside those of plain references."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.references.ngram_reference import (
    Reference,
    Trie,
    continuation,
    several_matches,
)

Node = tuple[int, ...]


def trie_of(
    text: Sequence[int],
    state: Any,
    rates: Sequence[float],
    depth: int,
    vocab: int,
    tokens: Sequence[int] = (),
) -> Trie:
    """The trie of the matches in a text and in the tokens of a reference.

    `state` has the lengths and the number of matches.
    """
    paths, reference = [], Reference(state.width, tokens)
    for match in several_matches(
        text, state.min_n, state.max_n, state.matches, reference=reference
    ):
        path = continuation(text, match.start, depth, reference)
        bad = [place for place, token in enumerate(path) if not 0 <= token < vocab]
        rate = rates[match.length + (state.lengths if match.start >= state.width else 0)]
        paths.append((path[: bad[0] if bad else depth], rate))
    return Trie(paths)


def nodes_in(table: Any, row: int, first: int, matches: int, depth: int) -> dict[Node, float]:
    """The nodes of a table's row, by their tokens from the root, with their scores.

    What stands behind a place without a token of the vocabulary is left out.
    """
    scores, tokens, parents = (
        each[row].tolist() for each in (table.scores, table.tokens, table.parents)
    )
    paths: dict[int, Node] = {-1: ()}
    found: dict[Node, float] = {}
    for column in range(first, first + matches * depth):
        if scores[column] == -math.inf:
            continue
        parent = parents[column]
        assert parent < column
        assert parent < 0 or scores[column] <= scores[parent]
        node = paths[column] = (*paths[parent], tokens[column])
        assert len(node) == (column - first) // matches + 1
        if scores[column] > -1e19:
            assert node not in found
            found[node] = scores[column]
    return found


def check_nodes(found: dict[Node, float], trie: Trie) -> None:
    """Compare what a table has with the reference."""
    expected = {node: score for node, score in trie.scores.items() if node}
    assert found.keys() == expected.keys()
    for node, score in found.items():
        assert score == pytest.approx(expected[node], rel=1e-4, abs=1e-4)

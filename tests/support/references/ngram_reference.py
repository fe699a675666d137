"""Slow, plain versions of what n-grams add to a tree: the oracle of the kernels' tests."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from vllm_graft.spec_decode.trees.text_state import BORDER
from vllm_graft.spec_decode.trees.tree import num_candidates


class Match(NamedTuple):
    """Where the end of a text has occurred before.

    Attributes:
        start: place of the token behind the earlier occurrence; in a reference, `Reference.first`
            and more.
        length: tokens that are equal, at most the longest length that is told apart.
    """

    start: int
    length: int


class Reference(NamedTuple):
    """A second text in which matches are found."""

    first: int
    tokens: Sequence[int]

    def match(self, text: Sequence[int], max_n: int) -> Match | None:
        """The longest suffix of a text within a piece that goes on behind it, its last place."""
        text, tokens = list(text), list(self.tokens)
        for length in range(max_n, 0, -1):
            for start in range(len(tokens) - 1, length - 1, -1):
                same = tokens[start - length : start] == text[len(text) - length :]
                if same and tokens[start] != BORDER:
                    return Match(self.first + start, length)
        return None

    def behind(self, start: int, count: int) -> list[int]:
        """At most ``count`` tokens from a place on, up to the end of the piece."""
        found = list(self.tokens[start - self.first :][:count])
        return found[: found.index(BORDER)] if BORDER in found else found


NO_REFERENCE = Reference(1 << 30, ())


def best_match(text: Sequence[int], reference: Reference, min_n: int, max_n: int) -> Match | None:
    """The longer one of the matches in a text and in its reference; of equals the latter."""
    own, other = last_match(text, min_n, max_n), reference.match(text, max_n)
    return other if other and (own is None or other.length >= own.length) else own


def last_match(text: Sequence[int], min_n: int, max_n: int) -> Match | None:
    """The longest suffix of at most ``max_n`` tokens that has occurred before, its last place."""
    text = list(text)
    for length in range(max_n, min_n - 1, -1):
        for start in range(len(text) - 1, length - 1, -1):
            if text[start - length : start] == text[len(text) - length :]:
                return Match(start, length)
    return None


def continuation(
    text: Sequence[int], start: int, count: int, reference: Reference = NO_REFERENCE
) -> list[int]:
    """``count`` tokens from a place on, where the text goes on with what is returned."""
    if start >= reference.first:
        return reference.behind(start, count)
    text = list(text)
    before = len(text)
    for k in range(count):
        text.append(text[start + k])
    return text[before:]


def observed(
    text: Sequence[int], match: Match, before: int, depth: int, reference: Reference = NO_REFERENCE
) -> tuple[int, int]:
    """How a match of the first ``before`` tokens did: tokens that were compared, and equal ones."""
    come = list(text[before : before + depth])
    predicted = continuation(text[:before], match.start, len(come), reference)
    come = come[: len(predicted)]
    hits = 0
    while hits < len(come) and come[hits] == predicted[hits]:
        hits += 1
    return hits + (hits < len(come)), hits


def learned(rate: float, trials: int, hits: int, memory: float) -> float:
    """A rate after some trials, older ones counting less."""
    return rate + (hits / trials - rate) * (1 - math.exp(-trials / memory)) if trials else rate


class Candidates:
    """One request's candidates as lists, as in `CandidateTable`."""

    def __init__(self, scores: list[float], tokens: list[int], parents: list[int]) -> None:
        self.scores, self.tokens, self.parents = list(scores), list(tokens), list(parents)

    def insert(
        self, tokens: Sequence[int], rate: float, *, topk: int, levels: int, first: int, depth: int
    ) -> None:
        """Add a path of tokens; columns from ``first`` on take what is not there yet."""
        count = num_candidates(topk, levels)
        columns = iter(range(first, first + depth))
        log_rate = np.log(np.float32(rate))
        for column in range(first, first + depth):
            self.scores[column], self.tokens[column], self.parents[column] = -math.inf, 0, -1
        current = -1
        for place, token in enumerate(tokens, start=1):
            score = float(np.float32(place) * log_rate)
            known = [
                i for i in range(count) if (self.parents[i], self.tokens[i]) == (current, token)
            ]
            if current < count and known:
                current = known[0]
                self.scores[current] = max(self.scores[current], score)
            else:
                column = next(columns)
                self.scores[column], self.tokens[column] = score, token
                self.parents[column], current = current, column


def several_matches(
    text: Sequence[int],
    min_n: int,
    max_n: int,
    count: int,
    alike: int = 4,
    reference: Reference = NO_REFERENCE,
) -> list[Match]:
    """The best matches, longest first, of equals the last; one of each ``alike`` next tokens."""
    text = list(text)
    found: list[Match] = []
    for start in range(1, len(text)):
        length = 0
        while length < min(max_n, start) and text[start - 1 - length] == text[-1 - length]:
            length += 1
        if length >= min_n:
            found.append(Match(start, length))
    tokens = list(reference.tokens)
    for start in range(1, len(tokens)):
        length = 0
        while (
            length < min(max_n, start, len(text))
            and tokens[start - 1 - length] == text[-1 - length]
        ):
            length += 1
        if length and tokens[start] != BORDER:
            found.append(Match(reference.first + start, length))
    found.sort(key=lambda match: (-match.length, -match.start))
    kept: dict[tuple[int, ...], Match] = {}
    for match in found:
        kept.setdefault(tuple(continuation(text, match.start, alike, reference)), match)
    return list(kept.values())[:count]


class Trie:
    """The nodes of some paths by their tokens from the root."""

    def __init__(self, paths: Sequence[tuple[Sequence[int], float]]) -> None:
        """Make the nodes of paths, each with the rate of its match, best first."""
        self.scores: dict[tuple[int, ...], float] = {(): 0.0}
        self.owners: dict[tuple[int, ...], int] = {}
        children: dict[tuple[int, ...], list[float]] = {}
        for depth in range(1, 1 + max((len(path) for path, _ in paths), default=0)):
            for number, (path, rate) in enumerate(paths):
                node = tuple(path[:depth])
                if len(path) < depth or node in self.owners:
                    continue
                siblings = children.setdefault(node[:-1], [])
                own = math.log(rate) + sum(math.log(1 - other) for other in siblings)
                self.scores[node] = self.scores[node[:-1]] + own
                self.owners[node] = number
                siblings.append(rate)


Node = tuple[int, ...]


def trie_of(
    text: Sequence[int],
    state: Any,
    rates: Sequence[float],
    depth: int,
    vocab: int,
    tokens: Sequence[int] = (),
) -> Trie:
    """The trie of the matches in a text and in the tokens of a reference."""
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
    """The nodes of a table's row, by their tokens from the root, with their scores."""
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

"""The kernels that make a tree of several matches, against plain references."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.references.ngram_reference import (
    NO_REFERENCE,
    Match,
    Reference,
    Trie,
    check_nodes,
    nodes_in,
    several_matches,
    trie_of,
)
from vllm_graft.spec_decode.kernels import ngram_insert
from vllm_graft.spec_decode.kernels.ngram_insert import insert_paths
from vllm_graft.spec_decode.kernels.ngram_match import match_ngrams
from vllm_graft.spec_decode.trees.text_state import BORDER, MAX_PLACE, NgramState
from vllm_graft.spec_decode.trees.tree import CandidateTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIRST = 3


@pytest.mark.parametrize(
    ("text", "count", "found"),
    [
        ([1, 2, 3, 4], 3, []),
        # Longer ones first, of equals the last; each has other tokens behind it.
        ([1, 5, 9, 1, 6, 2, 1, 7, 1], 2, [Match(7, 1), Match(4, 1)]),
        ([2, 1, 5, 9, 1, 6, 2, 1], 3, [Match(2, 2), Match(5, 1)]),
        # Two with the same four next tokens are one.
        ([1, 5, 6, 7, 8, 3, 1, 5, 6, 7, 8, 4, 1], 3, [Match(7, 1)]),
        ([1, 5, 6, 7, 8, 3, 1, 5, 6, 7, 9, 4, 1], 3, [Match(7, 1), Match(1, 1)]),
        ([4, 4, 4, 4], 3, [Match(3, 3)]),
    ],
)
def test_matches_by_hand(text: list[int], count: int, found: list[Match]) -> None:
    assert several_matches(text, 1, 4, count) == found
    state, *_ = grown(text, count, 2, lengths=(1, 4))
    keys = sorted(state.keys[0].tolist(), reverse=True)[: len(found)]
    assert [Match(key % MAX_PLACE + 1, key // MAX_PLACE) for key in keys] == found


def test_a_trie_by_hand() -> None:
    """Paths are one while their tokens are equal; a second child needs the first to be wrong."""
    trie = Trie([([7, 8], 0.75), ([7, 9], 0.5), ([6, 8], 0.5)])
    assert {node: math.exp(score) for node, score in trie.scores.items()} == pytest.approx(
        {
            (): 1,
            (7,): 0.75,
            (7, 8): 0.75 * 0.75,
            (7, 9): 0.75 * 0.25 * 0.5,
            (6,): 0.25 * 0.5,
            (6, 8): 0.25 * 0.5 * 0.5,
        }
    )


def grown(
    text: list[int],
    matches: int,
    depth: int,
    *,
    lengths: tuple[int, int] = (1, 4),
    vocab: int = 10**6,
    width: int = 0,
    room: int = 0,
    reference: Sequence[int] = (),
) -> tuple[NgramState, CandidateTable, Trie]:
    """Run the kernels over one text and a row of padding."""
    state = NgramState.allocate(
        *lengths, 2, width or len(text) + 3, DEVICE, matches=matches, reference=room
    )
    if room:
        state.refer(1, reference)
    source = torch.full((2, state.width), -9, dtype=torch.int32, device=DEVICE)
    source[1, : len(text)] = torch.tensor(text, dtype=torch.int32)
    total = torch.tensor([0, len(text)], dtype=torch.int32, device=DEVICE)
    table = CandidateTable.allocate(2, 1, FIRST, DEVICE, extra=matches * depth + 2)
    for each in (table.scores, table.tokens, table.parents):
        each.fill_(-7)
    slots = torch.tensor([1, -1], device=DEVICE)
    match_ngrams(state, source, total, slots, 2)
    # Whatever is read from now on must have been copied to the device.
    source.fill_(-9)
    insert_paths(table, state, total, slots, 2, first=FIRST, depth=depth, vocab_size=vocab)
    columns = slice(FIRST, FIRST + matches * depth)
    assert (table.scores[1, columns] == -math.inf).all()
    for each in (table.scores, table.tokens, table.parents):
        assert (each[:, :FIRST] == -7).all()
        assert (each[:, columns.stop :] == -7).all()
    trie = trie_of(text, state, state.rates.tolist(), depth, vocab, reference[:room])
    return state, table, trie


@pytest.mark.parametrize(
    ("seed", "beside"),
    [*((seed, False) for seed in range(24)), *((seed, True) for seed in range(16))],
)
def test_nodes_equal_the_reference(seed: int, beside: bool) -> None:
    """Some have pieces beside a text, cut where their room ends; rates of their own."""
    rng = random.Random(seed)
    matches, depth = rng.choice([1, 2, 3, 4, 8]), rng.randint(1, 6)
    shortest, vocab = 3 if beside else rng.randint(1, 3), rng.choice([2, 3, 5, 9])
    text = [rng.randrange(vocab) for _ in range(rng.randint(1 if beside else 20, 90))]
    lengths = (shortest, shortest + rng.randint(0, 4))
    options: dict[str, Any] = {"lengths": lengths}
    tokens: list[int] = []
    if beside:
        for _ in range(rng.randint(0, 6)):
            tokens += [*(rng.randrange(vocab) for _ in range(rng.randint(0, 12))), BORDER]
        options |= {"room": rng.randint(1, 60), "reference": tokens}
    state, table, trie = grown(text, matches, depth, **options)
    check_nodes(nodes_in(table, 0, FIRST, matches, depth), trie)
    reference = Reference(state.width, tokens[: options["room"]]) if beside else NO_REFERENCE
    best = several_matches(text, *lengths, 1, reference=reference)
    noted = [best[0].start, best[0].length] if best else [1, 0]
    assert state.notes[1].tolist() == [len(text), *noted, len(text)]


def test_a_reference_by_hand() -> None:
    """It wins where matches are equally long, may match with one token, and ends at a border."""
    tokens = [1, 2, 7, BORDER, 8, 2, BORDER, 2]
    _, table, trie = grown([1, 2, 5, 1, 2], 4, 3, room=8, reference=tokens, lengths=(2, 4))
    assert set(trie.owners) == {(7,), (5,), (5, 1), (5, 1, 2)}
    assert trie.owners[(7,)] == 0
    check_nodes(nodes_in(table, 0, FIRST, 4, 3), trie)
    _, table, trie = grown([3, 8], 4, 3, room=8, reference=tokens, lengths=(2, 4))
    assert set(trie.owners) == {(2,)}
    check_nodes(nodes_in(table, 0, FIRST, 4, 3), trie)


def test_matches_across_blocks() -> None:
    """Matches in several programs' blocks, of which two have the same tokens behind them."""
    rng = random.Random(0)
    text = [rng.randrange(100, 10**6) for _ in range(7000)]
    for place, behind in ((2045, 7), (3000, 8), (3500, 7), (5000, 9)):
        text[place : place + 10] = [1, 2, 3, 4, 5, 6, behind, 0, 0, 0]
    text[-6:] = [1, 2, 3, 4, 5, 6]
    matches = several_matches(text, 3, 8, 4)
    assert [match.start for match in matches] == [5006, 3506, 3006]
    _, table, trie = grown(text, 4, 5, lengths=(3, 8))
    assert len(trie.owners) == 15
    check_nodes(nodes_in(table, 0, FIRST, 4, 5), trie)


def test_a_path_ends_at_what_is_no_token() -> None:
    """What stands behind ranks after all other nodes, and is a token of the vocabulary."""
    text = [1, 2, -1, 4, 9, 1, 5, 12, 3, 9, 1]
    _, table, trie = grown(text, 3, 4, vocab=10)
    assert set(trie.owners) == {(2,), (5,)}
    check_nodes(nodes_in(table, 0, FIRST, 3, 4), trie)
    tokens = table.tokens[0, FIRST : FIRST + 12].tolist()
    assert all(0 <= token < 10 for token in tokens)


@pytest.mark.parametrize("what", ["keys", "rates", "history"])
def test_a_spoilt_state_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: other matches, rates or texts do not pass for right ones."""
    stock = insert_paths

    def spoil(table: Any, state: NgramState, *args: Any, **kwargs: Any) -> None:
        kept = getattr(state, what).clone()
        if what == "keys":
            state.keys.sub_((state.keys > 0).int())
        elif what == "rates":
            state.rates.mul_(0.9)
        else:
            state.history.add_(1)
        stock(table, state, *args, **kwargs)
        getattr(state, what).copy_(kept)

    monkeypatch.setattr("tests.spec_decode.kernels.test_ngram_paths.insert_paths", spoil)
    _, table, trie = grown([9, 1, 2, 3, 1, 4, 2, 1, 5, 6, 1], 3, 3)
    with pytest.raises(AssertionError):
        check_nodes(nodes_in(table, 0, FIRST, 3, 3), trie)


def test_a_growth_that_runs_again_is_the_same() -> None:
    """A graph is compared with launches in the same step: what is learned must not count twice."""
    state, table, _ = grown([1, 2, 3, 1, 2], 2, 3)
    text = [1, 2, 3, 1, 2, 3, 1, 4]
    source = torch.tensor([[0] * 8, text], dtype=torch.int32, device=DEVICE)
    total = torch.tensor([0, 8], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([1, -1], device=DEVICE)
    kept = []
    for _ in range(2):
        match_ngrams(state, source, total, slots, 2)
        insert_paths(table, state, total, slots, 2, first=FIRST, depth=3, vocab_size=9)
        kept.append([each[0].tolist() for each in (table.scores, table.tokens, table.parents)])
        # Of the three tokens that the match of two has predicted, two came true.
        assert state.pending[2].tolist() == [3, 2]
    assert kept[0] == kept[1]


def test_programs_with_many_keys_have_more_warps() -> None:
    assert [ngram_insert.warps(keys) for keys in (8, 512, 16_384)] == [1, 4, 8]

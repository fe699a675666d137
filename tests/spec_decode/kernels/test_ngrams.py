"""The kernels that find n-grams and put them among the candidates, against plain references."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.crossed import crossed
from tests.support.references.ngram_reference import Candidates, Match, last_match
from tests.support.worlds.ngram_worlds import World
from vllm_graft.spec_decode.kernels.ngram_insert import insert_ngrams
from vllm_graft.spec_decode.kernels.ngram_match import match_ngrams
from vllm_graft.spec_decode.trees.text_state import BORDER, MAX_PLACE, NgramState
from vllm_graft.spec_decode.trees.tree import CandidateTable, TreeShape, num_candidates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def equal(ours: list[Candidates], expected: list[Candidates]) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.parents == theirs.parents
        assert mine.scores == pytest.approx(theirs.scores, rel=1e-5)


def one_text(text: list[int], min_n: int = 2, max_n: int = 4, width: int = 0) -> Match | None:
    state = NgramState.allocate(min_n, max_n, 2, width or len(text) + 3, DEVICE)
    source = torch.full((2, state.history.shape[1]), -1, dtype=torch.int32, device=DEVICE)
    source[1, : len(text)] = torch.tensor(text, dtype=torch.int32)
    total = torch.tensor([0, len(text)], dtype=torch.int32, device=DEVICE)
    match_ngrams(state, source, total, torch.tensor([1], device=DEVICE), 1)
    assert state.history[1, : len(text)].tolist() == text
    key = int(state.keys[0].max())
    return Match(key % MAX_PLACE + 1, key // MAX_PLACE) if key else None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ([], None),
        ([1], None),
        ([1, 1], None),
        ([1, 2, 3, 4], None),
        ([1, 2, 9, 1, 2], Match(2, 2)),
        # The longest match wins, however old.
        ([5, 1, 2, 9, 8, 1, 2, 7, 5, 1, 2], Match(3, 3)),
        # Of equally long ones the last.
        ([5, 1, 2, 9, 5, 1, 2, 7, 5, 1, 2], Match(7, 3)),
        # A match may overlap the end that it is a match of.
        ([4, 4, 4], Match(2, 2)),
        ([3, 4, 3, 4, 3, 4], Match(4, 4)),
        # No more tokens than the longest length are told apart.
        ([1, 2, 3, 4, 5, 9, 0, 2, 3, 4, 5, 8, 1, 2, 3, 4, 5], Match(11, 4)),
    ],
)
def test_matches_by_hand(text: list[int], found: Match | None) -> None:
    assert one_text(text) == found
    assert last_match(text, 2, 4) == found


@given(
    text=st.lists(st.integers(0, 2), max_size=60), min_n=st.integers(1, 4), more=st.integers(0, 4)
)
@settings(max_examples=40, deadline=None)
def test_match_equals_reference(text: list[int], min_n: int, more: int) -> None:
    assert one_text(text, min_n, min_n + more, width=70) == last_match(text, min_n, min_n + more)


def test_a_match_across_blocks() -> None:
    """An earlier occurrence of which two programs have a part each, and a text of many blocks."""
    generator = torch.Generator().manual_seed(0)
    text: list[int] = torch.randint(100, 10**6, (7000,), generator=generator).tolist()
    text[2045:2051] = text[6980:6986] = text[-6:] = [1, 2, 3, 4, 5, 6]
    assert one_text(text, 3, 8) == Match(6986, 6)
    text[6980] = 7
    assert one_text(text, 3, 8) == Match(2051, 6)


CASES = {
    "narrow": (TreeShape(2, 3, 6), 5, 2, 3),
    "wide": (TreeShape(4, 2, 9), 5, 1, 8),
    "deep": (TreeShape(3, 4, 30), 3, 2, 6),
    "of two nodes": (TreeShape(1, 1, 2), 2, 1, 4),
    "short tables": (TreeShape(3, 4, 12), 4, 3, 5),
}
# Texts of up to 3,000 tokens. A reference is in one block with the end of one, or has blocks.
LONG = {
    "long narrow": (TreeShape(2, 3, 6), 5, 2, 3),
    "long wide": (TreeShape(8, 6, 63), 9, 3, 16),
    "of many children": (TreeShape(32, 2, 63), 40, 1, 8),
    "long of two nodes": (TreeShape(1, 1, 2), 2, 1, 4),
}
LONG_GIVEN = [*((case, (0, 0)) for case in LONG), ("long wide", (3, 40)), ("long wide", (3, 3000))]
STEPS = [
    *crossed([*CASES], [(0, 0), (1, 0), (0, 40), (1, 57)]),
    *(pytest.param(*each, marks=pytest.mark.gpu) for each in LONG_GIVEN),
]


def world(case: str, seed: int, reference: int = 0) -> World:
    shape, vocab, min_n, max_n = (CASES | LONG)[case]
    width, max_reqs = (4900, 9) if case in LONG else (200, 5)
    return World(min_n, max_n, shape, vocab, width, max_reqs, DEVICE, seed, reference)


@pytest.mark.parametrize(("case", "given"), STEPS)
def test_steps_equal_the_reference(case: str, given: tuple[int, int]) -> None:
    """Texts that grow, slots that change hands and padding, over many steps."""
    found, (seed, reference) = 0, given
    here = world(case, seed, reference)
    own = range(here.max_reqs - 1)
    for slot in own:
        length = here.rng.randrange(20, 3000) if case in LONG else 30
        here.add(slot, [here.rng.randrange(here.vocab) for _ in range(length)], here.pieces())
    for number in range(9):
        slots = [*here.rng.sample(own, here.rng.randint(1, 4)), -1]
        here.rng.shuffle(slots)
        levels = here.rng.randint(1, here.shape.steps)
        num_nodes = here.rng.randint(1, here.shape.num_nodes)
        before, ours, expected = here.step(slots, levels, num_nodes)
        equal(ours, expected)
        assert here.state.rates.tolist() == pytest.approx(here.rates, rel=1e-4)
        count = num_candidates(here.shape.topk, levels)
        found += sum(max(row.scores[count : count + num_nodes]) > -math.inf for row in ours)
        for row, old in zip(ours, before):
            check_tree(row, count, num_nodes, old)
        for slot in set(slots) - {-1}:
            here.emit(slot)
        if number == 4:
            here.add(1, [here.rng.randrange(here.vocab) for _ in range(20)], here.pieces())
    assert found > 2
    kinds = torch.tensor(here.rates).view(-1, here.state.lengths)
    guesses = NgramState.allocate(here.min_n, here.max_n, 1, 8, "cpu").rates
    assert (kinds != guesses).any(1).all()


def check_tree(row: Candidates, count: int, num_nodes: int, before: Candidates) -> None:
    """Check what the choice of the best nodes relies on."""
    real = [i for i in range(count + num_nodes) if row.scores[i] > -math.inf]
    assert len({(row.parents[i], row.tokens[i]) for i in real}) == len(real)
    for i in real:
        parent = row.parents[i]
        assert parent < i
        assert parent < 0 or row.scores[i] <= row.scores[parent]
    assert row.tokens[:count] == before.tokens[:count]
    assert all(new >= old for new, old in zip(row.scores[:count], before.scores[:count]))
    rest = slice(count + num_nodes, None)
    assert row.scores[rest] == before.scores[rest]


@pytest.mark.parametrize("what", ["notes", "keys", "rates"])
def test_a_spoilt_state_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: stale notes, another match or other rates do not pass for right ones."""

    def spoil(table: Any, state: NgramState, *args: Any, **kwargs: Any) -> None:
        if what == "notes":
            state.notes[:, 1].clamp_(min=1).sub_(1)
        elif what == "keys":
            state.keys.sub_((state.keys > 0).int())
        else:
            state.rates.mul_(0.9)
        insert_ngrams(table, state, *args, **kwargs)

    monkeypatch.setattr("tests.support.worlds.ngram_worlds.insert_ngrams", spoil)
    with pytest.raises(AssertionError):
        test_steps_equal_the_reference("narrow", (1, 0))


@pytest.mark.parametrize("what", ["no borders", "the last one's"])
def test_a_wrong_reference_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: matches across borders, or in a reference of the request before."""
    refer = NgramState.refer

    def spoil(state: NgramState, slot: int, tokens: list[int]) -> None:
        if what == "no borders":
            refer(state, slot, [token for token in tokens if token != BORDER])
        elif int(state.history[slot, state.width]) == BORDER:
            refer(state, slot, tokens)

    monkeypatch.setattr(NgramState, "refer", spoil)
    with pytest.raises(AssertionError):
        test_steps_equal_the_reference("deep", (0, 40))


def tables_of(reference: int) -> list[list[Any]]:
    """What steps without a reference leave, in a state that has room for one."""
    here = world("wide", 5, reference)
    found: list[list[Any]] = []
    for slot in range(3):
        here.add(slot, [here.rng.randrange(here.vocab) for _ in range(40)])
    for _ in range(6):
        _, ours, _ = here.step([2, 0, -1, 1], 2, 9)
        found.append([(row.scores, row.tokens, row.parents) for row in ours])
        found.append([here.state.notes.tolist(), here.state.history[:, :200].tolist()])
        for slot in range(3):
            here.emit(slot)
    return [*found, here.state.rates[: here.state.lengths].tolist()]


def test_room_for_a_reference_changes_nothing_by_itself() -> None:
    assert tables_of(0) == tables_of(70)


def test_a_text_that_fills_its_width_ends_there() -> None:
    """The reference's columns follow the text's: no match goes from one into the other."""
    state = NgramState.allocate(2, 6, 1, 8, DEVICE, reference=6)
    assert state.width == 8
    text = [3, 9, 9, 1, 2, 9, 1, 2]
    # Behind the text's last two tokens, as if it went on; then the same two and another one.
    state.refer(0, [5, 4, BORDER, 1, 2, 6])
    source = torch.tensor([text], dtype=torch.int32, device=DEVICE)
    total = torch.tensor([8], dtype=torch.int32, device=DEVICE)
    match_ngrams(state, source, total, total.long() * 0, 1)
    best = int(state.keys[0].max())
    # Three tokens of the text win over two of the reference.
    assert (best % MAX_PLACE + 1, best // MAX_PLACE) == (5, 3)
    text[2] = 8
    match_ngrams(
        state, torch.tensor([text], dtype=torch.int32, device=DEVICE), total, total.long() * 0, 1
    )
    best = int(state.keys[0].max())
    assert (best % MAX_PLACE + 1, best // MAX_PLACE) == (8 + 5, 2)


def test_a_reference_is_cut_and_replaced() -> None:
    state = NgramState.allocate(2, 6, 2, 8, DEVICE, reference=4)
    state.refer(1, [1, 2, 3, 4, 5, 6])
    assert state.history[1, 8:].tolist() == [1, 2, 3, 4]
    assert state.history[0, 8:].tolist() == [BORDER] * 4
    state.refer(1, [7])
    assert state.history[1, 8:].tolist() == [7, BORDER, BORDER, BORDER]
    state.refer(1, [])
    assert state.history[1].tolist() == [0] * 8 + [BORDER] * 4


def test_a_growth_that_runs_again_is_the_same() -> None:
    """A graph is compared with launches in the same step: rates and notes must not move on."""
    here = world("narrow", 3)
    here.add(0, [1, 2, 3, 1, 2])
    here.step([0], 2, 6)
    here.texts[0] += [3, 1, 4]
    source = torch.tensor([here.texts[0]], dtype=torch.int32, device=DEVICE)
    total = torch.tensor([8], dtype=torch.int32, device=DEVICE)
    tables = []
    for _ in range(2):
        table = CandidateTable.allocate(1, 2, 2, DEVICE, extra=6)
        slots = total.long() * 0
        match_ngrams(here.state, source, total, slots, 1)
        insert_ngrams(table, here.state, total, slots, 1, levels=2, first=6, depth=6, vocab_size=5)
        tables.append([each.tolist() for each in (table.scores, table.tokens, table.parents)])
        # Of the three predicted tokens two came true.
        assert here.state.pending[2].tolist() == [3, 2]
    assert tables[0] == tables[1]


def test_a_path_ends_at_what_is_no_token() -> None:
    """Places of embeddings in a prompt, and ids that the target's vocabulary lacks."""
    here = world("narrow", 0)
    here.add(0, [1, 2, 3, -1, 4, 0, 1, 2])
    here.add(1, [1, 2, 3, here.vocab, 4, 0, 1, 2])
    _, ours, expected = here.step([0, 1], 2, 6)
    equal(ours, expected)
    first = num_candidates(2, 2)
    for row in ours:
        assert all(0 <= token < here.vocab for token in row.tokens[first : first + 6])


def test_texts_that_no_key_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="has at most"):
        NgramState.allocate(1, 2, 0, MAX_PLACE + 1, DEVICE)

"""The vocabulary that follows the text: its choices, and when it is used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from vllm_graft.spec_decode.heads import hot_vocabulary
from vllm_graft.spec_decode.heads.hot_rows import PlainRows
from vllm_graft.spec_decode.heads.hot_vocabulary import (
    COVERAGE,
    LATE,
    PERIOD,
    READ,
    RECENT,
    HotVocabulary,
)
from vllm_graft.spec_decode.lookup.served_references import carry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, DRAFT, SIZE = 60, 20, 5
TARGETS = [3 * row for row in range(DRAFT)]
"""The target's id of each draft token."""


@pytest.fixture
def head() -> torch.Tensor:
    return torch.arange(DRAFT * 4.0, device=DEVICE).view(DRAFT, 4)


@pytest.fixture
def hot(head: torch.Tensor) -> HotVocabulary:
    rows = PlainRows(SimpleNamespace(weight=head, tp_size=1), SIZE)
    return HotVocabulary(SIZE, torch.tensor(TARGETS, device=DEVICE), VOCAB, rows)


def serve(hot: HotVocabulary, text: dict[int, int], steps: int = PERIOD) -> None:
    """Let `steps` pass; the first emits `text`, a count for each token."""
    for token, count in text.items():
        hot.emitted[token] += count
    for _ in range(steps):
        hot.step()


def in_use(hot: HotVocabulary) -> bool:
    return hot.narrows(7, 1)


def test_the_most_frequent_tokens_are_chosen(hot: HotVocabulary, head: torch.Tensor) -> None:
    serve(hot, {57: 9, 30: 1, 33: 4, 6: 2, 3: 2, 0: 1})
    # Tokens are in the target's order; the first of two tokens that were emitted once is taken.
    assert hot.target_ids.tolist() == [0, 3, 6, 33, 57]
    assert isinstance(hot.rows, PlainRows)
    chosen = [TARGETS.index(token) for token in hot.target_ids.tolist()]
    assert torch.equal(hot.rows.weight, head[chosen])
    states = torch.randn(3, 4, device=DEVICE)
    assert torch.equal(hot.rows.multiply(states), states @ head[chosen].t())
    assert not hot.emitted.any()


def test_addresses_stay(hot: HotVocabulary) -> None:
    def addresses() -> list[int]:
        held: Any = hot.rows
        return [each.data_ptr() for each in (hot.target_ids, held.weight, hot.emitted)]

    before = addresses()
    serve(hot, {57: 9, 30: 1}, 3 * PERIOD)
    assert before == addresses()


def test_it_is_used_once_a_later_text_was_covered(hot: HotVocabulary) -> None:
    text = {57: 9, 30: 5, 33: 4}
    serve(hot, text, PERIOD + LATE)
    # A vocabulary is chosen, but its coverage is unknown: only a guess was judged so far.
    assert (in_use(hot), hot.coverage, hot.choices) == (False, None, 1)
    serve(hot, text, PERIOD - 1)
    assert not in_use(hot)
    serve(hot, {}, 1)
    assert in_use(hot)
    report = hot.report()
    assert report == {
        "size": SIZE,
        "bytes": SIZE * 16,
        "active": True,
        "coverage": 1.0,
        "choices": 2,
        "steps": 1,
    }
    assert hot.numbers() == {"hot_steps": 1, "hot_coverage": 1.0}


def test_a_guess_that_fits_is_not_believed(hot: HotVocabulary) -> None:
    serve(hot, {0: 50}, PERIOD + LATE)
    assert not in_use(hot)


@pytest.mark.parametrize("missed", [1, 2, 3])
def test_it_is_used_while_it_holds_nearly_all(hot: HotVocabulary, missed: int) -> None:
    serve(hot, {57: 9, 30: 5, 33: 4}, 2 * PERIOD + LATE)
    assert not in_use(hot)
    serve(hot, {57: 100 - missed, 15: missed})
    assert hot.coverage == pytest.approx(1 - missed / 100)
    assert in_use(hot) is (missed < 2)
    assert pytest.approx(0.98) == COVERAGE


def test_what_it_must_hold_depends_on_what_it_saves(hot: HotVocabulary) -> None:
    serve(hot, {57: 9, 30: 5, 33: 4}, 2 * PERIOD + LATE)
    serve(hot, {57: 90, 15: 10})
    assert not in_use(hot)
    hot.least = lambda nodes, num_reqs: {(7, 1): 0.85, (7, 16): 0.95}[nodes, num_reqs]
    assert hot.narrows(7, 1)
    assert not hot.narrows(7, 16)


def test_recent_texts_weigh_most(hot: HotVocabulary) -> None:
    serve(hot, {57: 9}, PERIOD + LATE)
    serve(hot, {57: 100})
    serve(hot, {57: 80, 15: 20})
    assert hot.coverage == pytest.approx((100 * RECENT + 80) / (100 * RECENT + 100))


def test_another_text_is_learned_in_a_few_periods(hot: HotVocabulary) -> None:
    old, new = dict.fromkeys([0, 3, 6, 9, 12], 10), dict.fromkeys([45, 48, 51, 54, 57], 10)
    serve(hot, old, PERIOD + LATE)
    serve(hot, old)
    assert in_use(hot)
    # After two periods the old text still weighs as much as the new one.
    for _ in range(2):
        serve(hot, new)
        assert not in_use(hot)
    serve(hot, new)
    assert hot.target_ids.tolist() == [45, 48, 51, 54, 57]
    before = hot.coverage
    serve(hot, new)
    assert before is not None
    assert hot.coverage is not None
    assert hot.coverage > before


def test_tokens_of_new_prompts_are_chosen(hot: HotVocabulary) -> None:
    """An answer speaks of what was asked, before anything of it was emitted."""
    hot.begin(0, request([15, 15, 18, 18, 1, VOCAB + 7, -1]))
    serve(hot, {57: 9, 30: 1, 33: 4, 6: 1, 9: 1})
    assert hot.target_ids.tolist() == [6, 15, 18, 33, 57]
    serve(hot, {12: 3, 24: 3})
    assert 18 not in hot.target_ids.tolist(), "a prompt counts once"
    hot.begin(1, request(None))
    serve(hot, {})


def request(tokens: list[int] | None) -> Any:
    return SimpleNamespace(prompt_token_ids=tokens)


def test_only_the_end_of_a_long_prompt_counts(hot: HotVocabulary) -> None:
    hot.read([51] * 100 + [54] * READ)
    hot.read([48] * 3)
    serve(hot, {0: 1, 3: 1, 6: 1, 9: 1, 12: 1, 15: 1})
    assert hot.target_ids.tolist() == [0, 3, 6, 48, 54]


def test_more_prompts_than_there_is_room_for_are_left_out(
    hot: HotVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_vocabulary, "_ROOM", 4)
    hot.read([54, 54, 51])
    hot.read([48, 48, 48])
    hot.read([45] * 9)
    serve(hot, {})
    assert 48 in hot.target_ids.tolist()
    assert 45 not in hot.target_ids.tolist()


def test_prompts_are_written_where_no_copy_reads(hot: HotVocabulary) -> None:
    """The device may still copy the prompts of one period while those of the next come."""
    hot.read([57])
    first = hot._read.data_ptr()
    serve(hot, {})
    hot.read([54])
    assert hot._read.data_ptr() != first
    assert int(hot._copying[0]) == 57
    serve(hot, {})
    assert hot._read.data_ptr() == first


def test_what_no_draft_can_propose_counts_for_nothing(hot: HotVocabulary) -> None:
    text = {57: 9, 58: 1000}
    serve(hot, text, PERIOD + LATE)
    serve(hot, text)
    assert hot.coverage == 1.0
    assert 57 in hot.target_ids.tolist()


def test_silence_changes_nothing(hot: HotVocabulary) -> None:
    serve(hot, {57: 9}, PERIOD + LATE)
    serve(hot, {57: 9})
    assert in_use(hot)
    serve(hot, {}, 4 * PERIOD)
    assert in_use(hot)
    assert 57 in hot.target_ids.tolist()


def test_the_host_waits_for_nothing_but_the_event(
    hot: HotVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host reads the copy, `LATE` steps after it was made."""
    read: list[int] = []
    steps = 0
    tolist = torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        read.append(steps)
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    monkeypatch.setattr(torch.Tensor, "item", lambda _: pytest.fail("a value was waited for"))
    for _ in range(2 * PERIOD):
        steps += 1
        hot.begin(0, request([3, 6, 9]))
        hot.step()
    # The first copy is read although no choice was made before it.
    assert read == [LATE, PERIOD + LATE]


def test_texts_of_requests_that_do_not_teach_are_not_read(hot: HotVocabulary) -> None:
    """A slot teaches again with a request that does."""

    def begin(slot: int, salt: str | None, *tokens: int) -> None:
        asked: Any = SimpleNamespace(
            sampling_params=SamplingParams(), prompt_token_ids=list(tokens), cache_salt=salt
        )
        carry(asked, None, learn_salted=False)
        hot.begin(slot, asked)

    teaches = hot.keep_apart(3)
    begin(1, "a", *[57] * 90)
    assert teaches.tolist() == [1, 0, 1]
    begin(2, None, 30, 30)
    begin(1, None, 33, 33)
    begin(0, "a", 57)
    assert teaches.tolist() == [0, 1, 1]
    serve(hot, {})
    assert 57 not in hot.target_ids.tolist()
    assert {30, 33} <= set(hot.target_ids.tolist())
    # The control: what is not kept apart counts.
    hot.teaches = None
    begin(1, "a", *[57] * 90)
    serve(hot, {})
    assert 57 in hot.target_ids.tolist()

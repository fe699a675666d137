"""The vocabulary that follows the text: its choices, and when it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_graft.spec_decode.heads.hot_vocabulary import COVERAGE, LATE, PERIOD, HotVocabulary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, DRAFT, SIZE = 60, 20, 5
TARGETS = [3 * row for row in range(DRAFT)]
"""The target's id of each draft token."""


@pytest.fixture
def head() -> torch.Tensor:
    return torch.arange(DRAFT * 4.0, device=DEVICE).view(DRAFT, 4)


@pytest.fixture
def hot(head: torch.Tensor) -> HotVocabulary:
    def gather(rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.index_select(head, 0, rows, out=out)

    return HotVocabulary(SIZE, torch.tensor(TARGETS, device=DEVICE), VOCAB, gather)


def serve(hot: HotVocabulary, text: dict[int, int], steps: int = PERIOD) -> None:
    """Let `steps` pass; the first emits `text`, a count for each token."""
    for token, count in text.items():
        hot.emitted[token] += count
    for _ in range(steps):
        hot.step()


def rows(hot: HotVocabulary) -> list[int]:
    return [TARGETS.index(token) for token in hot.target_ids.tolist()]


def test_the_most_frequent_tokens_are_chosen(hot: HotVocabulary, head: torch.Tensor) -> None:
    serve(hot, {57: 9, 30: 1, 33: 4, 6: 2, 3: 2, 0: 1})
    # Tokens are in the target's order; the first of two tokens that were emitted once is taken.
    assert hot.target_ids.tolist() == [0, 3, 6, 33, 57]
    assert torch.equal(hot.weight, head[rows(hot)])
    assert not hot.emitted.any()


def test_addresses_stay(hot: HotVocabulary) -> None:
    before = [hot.target_ids.data_ptr(), hot.weight.data_ptr(), hot.emitted.data_ptr()]
    serve(hot, {57: 9, 30: 1}, 3 * PERIOD)
    assert before == [hot.target_ids.data_ptr(), hot.weight.data_ptr(), hot.emitted.data_ptr()]


def test_it_is_used_once_a_later_text_was_covered(hot: HotVocabulary) -> None:
    text = {57: 9, 30: 5, 33: 4}
    serve(hot, text, PERIOD + LATE)
    # A vocabulary is chosen, but its coverage is unknown: only a guess was judged so far.
    assert (hot.active, hot.coverage, hot.choices) == (False, None, 1)
    serve(hot, text, PERIOD - 1)
    assert not hot.active
    serve(hot, {}, 1)
    assert hot.active
    assert hot.report() == {"size": SIZE, "active": True, "coverage": 1.0, "choices": 2}


def test_a_guess_that_fits_is_not_believed(hot: HotVocabulary) -> None:
    serve(hot, {0: 50}, PERIOD + LATE)
    assert not hot.active


@pytest.mark.parametrize("missed", [1, 2, 3])
def test_it_is_used_while_it_holds_nearly_all(hot: HotVocabulary, missed: int) -> None:
    serve(hot, {57: 9, 30: 5, 33: 4}, 2 * PERIOD + LATE)
    assert not hot.active
    serve(hot, {57: 100 - missed, 15: missed})
    assert hot.coverage == 1 - missed / 100
    assert hot.active is (hot.coverage >= COVERAGE)


def test_another_text_switches_it_off_until_it_is_learned(hot: HotVocabulary) -> None:
    old, new = dict.fromkeys([0, 3, 6, 9, 12], 10), dict.fromkeys([45, 48, 51, 54, 57], 10)
    serve(hot, old, PERIOD + LATE)
    serve(hot, old)
    assert hot.active
    # After two periods the old text still weighs as much as the new one.
    for _ in range(2):
        serve(hot, new)
        assert not hot.active
    serve(hot, new)
    assert hot.active
    assert hot.target_ids.tolist() == [45, 48, 51, 54, 57]


def test_what_no_draft_can_propose_counts_for_nothing(hot: HotVocabulary) -> None:
    text = {57: 9, 58: 1000}
    serve(hot, text, PERIOD + LATE)
    serve(hot, text)
    assert hot.coverage == 1.0
    assert 57 in hot.target_ids.tolist()


def test_silence_changes_nothing(hot: HotVocabulary) -> None:
    serve(hot, {57: 9}, PERIOD + LATE)
    serve(hot, {57: 9})
    assert hot.active
    serve(hot, {}, 4 * PERIOD)
    assert hot.active
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
        hot.step()
    # The first copy is read although no choice was made before it.
    assert read == [LATE, PERIOD + LATE]

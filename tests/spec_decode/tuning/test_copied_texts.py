"""Texts that copy themselves are told from others, at a cost that no text decides."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.spec_decode.tuning.copied_texts import EVERY, WATCHED, WINDOW, CopiedTexts, copied

RNG = random.Random(7)


def text(length: int, words: int = 50_000) -> list[int]:
    return [RNG.randrange(words) for _ in range(length)]


def by_hand(tokens: list[int], most: int) -> int:
    """The longest end of a text that stands in it before, by comparing all slices."""

    def stands_before(length: int) -> bool:
        starts = range(len(tokens) - length)
        return any(tokens[start : start + length] == tokens[-length:] for start in starts)

    return max(filter(stands_before, range(1, min(most, len(tokens) - 1) + 1)), default=0)


@pytest.mark.parametrize("words", [1, 2, 3, 40])
def test_as_by_hand(words: int) -> None:
    for length in range(40):
        tokens = text(length, words)
        assert copied(tokens, 12) == by_hand(tokens, 12)


def test_what_left_the_window_is_not_found() -> None:
    begin, rest = text(20), text(WINDOW - 20)
    assert copied(begin + rest + begin, 20) == 0
    assert copied(begin + rest[40:] + begin, 20) == 20


class Requests(dict[str, Any]):
    def add(self, name: str, tokens: list[int]) -> list[int]:
        self[name] = SimpleNamespace(all_token_ids=tokens)
        return tokens


def look(texts: CopiedTexts, names: list[str], most: int = 20) -> int:
    return max(texts.longest(names, most) for _ in range(EVERY))


def test_a_text_that_grows_is_read_on() -> None:
    requests, source = Requests(), text(3 * WINDOW)
    tokens = requests.add("a", list(source))
    texts = CopiedTexts(requests)
    assert look(texts, ["a"]) == 0
    for place in range(2 * WINDOW + 100, 2 * WINDOW + 112):
        tokens.append(source[place])
    assert look(texts, ["a"]) == 12
    # Many tokens later the same is asked of another text under this name.
    requests.add("a", text(50))
    assert look(texts, ["a"]) == 0
    requests.clear()
    assert look(texts, ["a"]) == 0


def test_only_some_steps_and_requests_are_looked_at() -> None:
    requests, copy = Requests(), text(30) * 2
    for number in range(WATCHED):
        requests.add(str(number), text(60))
    requests.add("copy", copy)
    texts = CopiedTexts(requests)
    assert look(texts, [*map(str, range(WATCHED)), "copy"]) == 0
    assert [texts.longest(["copy"], 20) for _ in range(2 * EVERY)].count(20) == 2


def test_what_is_kept_does_not_grow_with_a_text() -> None:
    requests = Requests()
    tokens = requests.add("a", text(10))
    texts = CopiedTexts(requests)
    for _ in range(5):
        tokens += text(WINDOW)
        look(texts, ["a"])
        assert all(len(kept) <= 3 * WINDOW for _, kept in texts._texts.values())
    tokens += text(4 * WINDOW)
    look(texts, ["a"])
    assert all(len(kept) <= WINDOW for _, kept in texts._texts.values())

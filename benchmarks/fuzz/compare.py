"""Compare two servers' answers to one request, and explain differences by rules that have names.

A difference that no rule explains is a failure of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.fuzz.answers import Answer, Choice, Place
from benchmarks.fuzz.requests import FuzzRequest

LOGPROB_TOLERANCE = 1e-3
"""Largest difference of equal logprobs, by float32 rounding in batches of other sizes."""
TIE = 1e-4
"""Two logprobs that differ by less may change places."""

Gap = Callable[[FuzzRequest, int, int, int], float | None]
"""A function that asks the reference how much less likely another token was than its own.

The arguments are the request, an answer's index, a place in it, and the other token. The result is
None where that can't be told.
"""


@dataclass(frozen=True)
class Difference:
    """One thing in which two answers differ."""

    what: str
    expected: Any
    found: Any
    choice: int = 0
    place: int = 0

    def __str__(self) -> str:
        return (
            f"{self.what} of choice {self.choice} at {self.place}: "
            f"expected {self.expected!r:.300}, found {self.found!r:.300}"
        )


@dataclass(frozen=True)
class Verdict:
    """The result of one comparison.

    Attributes:
        rule: the rule that explains the differences; empty for equal answers, None if no rule does.
        differences: all that were found; only the first where a rule explains them.
    """

    rule: str | None
    differences: tuple[Difference, ...] = ()

    @property
    def failed(self) -> bool:
        return self.rule is None


Rule = Callable[[FuzzRequest, Answer, Answer], bool]
"""Whether a rule explains how an arm's answer (the last argument) differs from the reference's."""


@dataclass(frozen=True)
class Judge:
    """Compares answers of an arm with those of the reference.

    Attributes:
        gap: see `Gap`.
        rules: known differences of the arm, by name.
    """

    gap: Gap
    rules: Mapping[str, Rule]

    def compare(self, request: FuzzRequest, expected: Answer, found: Answer) -> Verdict:
        """Compare an arm's answer `found` with the reference's."""
        if request.abort_after is not None:
            return self._aborted(request, expected, found)
        differences = tuple(differing(request, expected, found))
        if not differences:
            return Verdict("")
        rule = self._rule(request, expected, found, differences)
        return Verdict(rule, differences if rule is None else differences[:1])

    def _rule(
        self, request: FuzzRequest, expected: Answer, found: Answer, all_of: tuple[Difference, ...]
    ) -> str | None:
        if not request.exact and all(each.what in RANDOM for each in all_of):
            return "no seed"
        if self._all_ties(request, all_of):
            return "near tie"
        return self._known(request, expected, found)

    def _known(self, request: FuzzRequest, expected: Answer, found: Answer) -> str | None:
        applying = (name for name, rule in self.rules.items() if rule(request, expected, found))
        return next(applying, None)

    def _aborted(self, request: FuzzRequest, expected: Answer, found: Answer) -> Verdict:
        """Compare broken-off streams: lengths depend on timing, but one must begin the other."""
        if expected.ok and found.ok:
            wrong = tuple(diverging(expected, found)) if request.exact else ()
            if not wrong or self._all_ties(request, wrong):
                return Verdict("abort")
        elif expected.status == found.status:
            return Verdict("abort")
        else:
            wrong = (Difference("status", _said(expected), _said(found)),)
        return Verdict(self._known(request, expected, found), wrong)

    def _all_ties(self, request: FuzzRequest, differences: tuple[Difference, ...]) -> bool:
        """Return whether each differing choice parts where two tokens are equally likely."""
        if request.get("temperature") != 0 or steered(request):
            return False
        splits = {each.choice: each for each in differences if each.what == "tokens"}
        if any(each.choice not in splits or each.what == "prompt" for each in differences):
            return False
        return all(self._tie(request, each) for each in splits.values())

    def _tie(self, request: FuzzRequest, split: Difference) -> bool:
        token = split.found[0] if split.found else None
        if token is None:
            return False
        gap = self.gap(request, split.choice, split.place, token)
        return gap is not None and abs(gap) < TIE


RANDOM = {"tokens", "text", "finish", "stop", "logprobs", "usage", "message"}
"""Parts of an answer that may differ where nothing determines it."""

STEERING = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
    "structured_outputs",
    "response_format",
    "use_beam_search",
)


def steered(request: FuzzRequest) -> bool:
    """Whether something else than the model's own logits chooses its greedy tokens."""
    return any(request.get(name) for name in STEERING) or request.get("min_tokens", 0) > 0


def differing(request: FuzzRequest, expected: Answer, found: Answer) -> Iterator[Difference]:
    """List every difference of two whole answers."""
    if found.faults != expected.faults:
        yield Difference("faults", expected.faults, found.faults)
    if (expected.status, expected.error) != (found.status, found.error):
        yield Difference("status", _said(expected), _said(found))
        return
    if expected.choices.keys() != found.choices.keys():
        yield Difference("choices", sorted(expected.choices), sorted(found.choices))
        return
    for index, choice in expected.choices.items():
        yield from _choices(index, choice, found.choices[index])
    if expected.usage != found.usage:
        last = max(expected.choices, default=0)
        yield Difference("usage", expected.usage, found.usage, last)


def _said(answer: Answer) -> tuple[int, str | None, str]:
    return answer.status, answer.error, answer.message[:200]


def _choices(index: int, a: Choice, b: Choice) -> Iterator[Difference]:
    split = _split(a.tokens, b.tokens)
    if split is not None:
        yield Difference("tokens", _tail(a.tokens, split), _tail(b.tokens, split), index, split)
    if a.text != b.text:
        place = next((i for i, (x, y) in enumerate(zip(a.text, b.text)) if x != y), 0)
        yield Difference("text", a.text[place:], b.text[place:], index, place)
    for name in ("finish", "stop", "message"):
        if getattr(a, name) != getattr(b, name):
            yield Difference(name, getattr(a, name), getattr(b, name), index)
    yield from _all_places(index, a.places, b.places)
    yield from _prompts(index, a.prompt, b.prompt)


def _split(a: list[int] | None, b: list[int] | None) -> int | None:
    """Return the place where two lists of tokens part; None if they don't."""
    if a == b:
        return None
    if a is None or b is None:
        return 0
    parted = (i for i, (x, y) in enumerate(zip(a, b)) if x != y)
    return next(parted, min(len(a), len(b)))


def _tail(tokens: list[int] | None, start: int) -> list[int] | None:
    return tokens if tokens is None else tokens[start:]


def _all_places(index: int, a: list[Place] | None, b: list[Place] | None) -> Iterator[Difference]:
    if a is None or b is None or len(a) != len(b):
        if a != b:
            yield Difference("logprobs", a, b, index)
        return
    for number, (x, y) in enumerate(zip(a, b)):
        if not same_place(x, y):
            yield Difference("logprobs", x, y, index, number)
            return


def same_place(a: Place, b: Place) -> bool:
    """Return whether two places are equal but for rounding."""
    return a.token == b.token and _near(a.logprob, b.logprob) and same_best(a.top, b.top)


def same_best(a: dict[str, float], b: dict[str, float]) -> bool:
    """Whether two lists of best tokens are equal but for rounding, which may swap the last."""
    if not a or not b:
        return bool(a) == bool(b)
    if any(not _near(a[token], b[token]) for token in a.keys() & b.keys()):
        return False
    return all(_near(a[token], min(b.values())) for token in a.keys() - b.keys()) and all(
        _near(b[token], min(a.values())) for token in b.keys() - a.keys()
    )


def _near(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) < LOGPROB_TOLERANCE


def _prompts(index: int, a: Any, b: Any) -> Iterator[Difference]:
    """Find differences of `prompt_logprobs`: ids mapped to logprob, rank and text, per token."""
    if a is None or b is None or len(a) != len(b):
        if a != b:
            yield Difference("prompt", a, b, index)
        return
    for number, (x, y) in enumerate(zip(a, b)):
        if not same_best(_values(x), _values(y)):
            yield Difference("prompt", x, y, index, number)
            return


def _values(place: dict[str, Any] | None) -> dict[str, float]:
    return {token: each["logprob"] for token, each in (place or {}).items()}


def diverging(expected: Answer, found: Answer) -> Iterator[Difference]:
    """Find where two broken-off streams part before the shorter one ends."""
    for index in expected.choices.keys() & found.choices.keys():
        a, b = expected.choices[index], found.choices[index]
        if a.tokens is not None and b.tokens is not None:
            split = _split(a.tokens, b.tokens)
            if split is not None and split < min(len(a.tokens), len(b.tokens)):
                yield Difference("tokens", a.tokens[split:], b.tokens[split:], index, split)
        elif not (a.text.startswith(b.text) or b.text.startswith(a.text)):
            yield Difference("text", a.text, b.text, index)

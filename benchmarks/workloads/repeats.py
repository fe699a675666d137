"""How often an answer's tokens repeat the text before them, or what other requests said."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

SHORTEST, LONGEST = 3, 8
"""Tokens of a match. The longest match counts, but a longer one than this is not looked for."""


class Texts:
    """What followed each few tokens when they were last seen."""

    def __init__(self) -> None:
        self._after: dict[tuple[Hashable, ...], Hashable] = {}

    def add(self, text: Sequence[Hashable], place: int) -> None:
        """Note the token at a place of a text, behind those before it."""
        for length in range(SHORTEST, min(LONGEST, place) + 1):
            self._after[tuple(text[place - length : place])] = text[place]

    def find(self, text: Sequence[Hashable], place: int) -> tuple[int, Hashable]:
        """The length of the longest match of the tokens before a place, and what followed it."""
        for length in range(min(LONGEST, place), SHORTEST - 1, -1):
            if (found := self._after.get(tuple(text[place - length : place]))) is not None:
                return length, found
        return 0, None


class Said(NamedTuple):
    """Tokens of a prompt and its answer, and the tenant's salt; memories part these."""

    prompt: Sequence[Hashable]
    answer: Sequence[Hashable]
    salt: str = ""


class Shares(NamedTuple):
    """Shares of the answers' tokens, 0 to 1, that the longest match says rightly.

    `own` looks in the request's own text, `others` in prompts and answers of the requests before,
    `either` in both: the longer match counts, and of equally long ones the own.
    """

    tokens: int
    own: float
    others: float
    either: float

    def __str__(self) -> str:
        return f"own text {self.own:.0%}, others' {self.others:.0%}, either {self.either:.0%}"


def shares(texts: Iterable[Said]) -> Shares:
    """Count over all answers, in the order in which they were given."""
    others: dict[str, Texts] = {}
    tokens = own = theirs = either = 0
    for said in texts:
        text, mine, known = (
            [*said.prompt, *said.answer],
            Texts(),
            others.setdefault(said.salt, Texts()),
        )
        for place, token in enumerate(text):
            if place >= len(said.prompt):
                near, far = mine.find(text, place), known.find(text, place)
                own, theirs = own + (near[1] == token), theirs + (far[1] == token)
                either += (near if near[0] >= far[0] else far)[1] == token
                tokens += 1
            mine.add(text, place)
        for place in range(len(text)):
            known.add(text, place)
    whole = max(1, tokens)
    return Shares(tokens, own / whole, theirs / whole, either / whole)

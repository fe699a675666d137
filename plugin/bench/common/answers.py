"""Compare greedy answers of the arms: how many equal the first arm's, and where others differ.

In 16 bits a pass over many rows rounds differently from a pass over one, so that tokens which are
nearly equally likely may change places. A difference at a large margin is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, and their margins if logprobs were asked for."""

    tokens: list[int]
    margins: list[float]

    @classmethod
    def of(cls, completion: Any) -> Answer:
        return cls(list(completion.token_ids), token_margins(completion))


def token_margins(completion: Any) -> list[float]:
    """For each token with logprobs, how far the best one is above the next, in nats."""
    margins = []
    for logprobs in completion.logprobs or []:
        best = sorted((entry.logprob for entry in logprobs.values()), reverse=True)
        margins.append(best[0] - best[1] if len(best) > 1 else math.inf)
    return margins


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """The first place where two answers of one length differ; None if they are equal."""
    pairs = enumerate(zip(tokens, others, strict=True))
    return next((place for place, (a, b) in pairs if a != b), None)


@dataclass(frozen=True)
class Comparison:
    """A comparison of an arm's answers with the first arm's, ``against``.

    Attributes:
        tokens: for each other answer, the place of its first different token.
        margins: how far the first arm's best token was above its next there, in nats.
    """

    arm: str
    against: str
    answers: int
    equal: int
    tokens: list[int]
    margins: list[float]

    def __str__(self) -> str:
        line = (
            f"{self.arm}: {self.equal} of {self.answers} greedy answers are those of {self.against}"
        )
        if self.tokens:
            places = ", ".join(
                f"token {token} (margin {margin:.4g})"
                for token, margin in zip(self.tokens, self.margins, strict=True)
            )
            line += f"; the others leave it at {places}"
        return line


def compare(answers: Mapping[str, Sequence[Answer]]) -> list[Comparison]:
    """Compare each arm's answers with those of the first, which has margins."""
    (against, wanted), *others = answers.items()
    compared = []
    for arm, found in others:
        places = [
            (place, reference.margins[place])
            for mine, reference in zip(found, wanted, strict=True)
            if (place := first_difference(mine.tokens, reference.tokens)) is not None
        ]
        tokens, margins = [place for place, _ in places], [margin for _, margin in places]
        equal = len(wanted) - len(places)
        compared.append(Comparison(arm, against, len(wanted), equal, tokens, margins))
    return compared

"""Greedy answers of the arms: how many are the first arm's, and where the others leave it.

In 16 bits a pass over many rows rounds otherwise than a pass over one, so that tokens which are
nearly equal may change places. A difference at a large margin is a fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_graft.bench.closed_loop import Answer


@dataclass(frozen=True)
class Comparison:
    """An arm's answers beside the first arm's.

    Attributes:
        arm: the name.
        against: of the first arm.
        answers: compared.
        equal: of these.
        tokens: of each other one, the place of its first different token.
        margins: there, by how much the first arm's best token was above its next, in nats.
    """

    arm: str
    against: str
    answers: int
    equal: int
    tokens: list[int]
    margins: list[float]

    def __str__(self) -> str:
        """A line for the terminal."""
        line = (
            f"{self.arm}: {self.equal} of {self.answers} greedy answers are those of {self.against}"
        )
        if self.tokens:
            places = ", ".join(
                f"token {token} (margin {margin:g})"
                for token, margin in zip(self.tokens, self.margins, strict=True)
            )
            line += f"; the others leave it at {places}"
        return line


def compare(answers: Mapping[str, Sequence[Answer]]) -> list[Comparison]:
    """Compare each arm's answers with those of the first, which has margins."""
    (against, wanted), *others = answers.items()
    return [_comparison(arm, found, against, wanted) for arm, found in others]


def _comparison(
    arm: str, found: Sequence[Answer], against: str, wanted: Sequence[Answer]
) -> Comparison:
    places = [
        (_first_difference(mine, reference), reference)
        for mine, reference in zip(found, wanted, strict=True)
        if mine.tokens != reference.tokens
    ]
    return Comparison(
        arm,
        against,
        len(wanted),
        len(wanted) - len(places),
        [token for token, _ in places],
        [reference.margins[token] for token, reference in places],
    )


def _first_difference(mine: Answer, reference: Answer) -> int:
    pairs = zip(mine.tokens, reference.tokens)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(reference.tokens) - 1)

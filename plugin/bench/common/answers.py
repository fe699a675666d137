"""Compare greedy answers of the arms: how many equal the first arm's, and where others differ. In
16 bits a pass over many rows rounds differently from a pass over one, so that tokens which are
nearly equally likely may change places. A difference at a large margin is a fault."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, and for those with logprobs the best one's margin in nats."""

    tokens: list[int]
    margins: list[float]

    @classmethod
    def of(cls, completion: Any) -> Self:
        """Read an answer from vLLM's ``CompletionOutput``."""
        margins = []
        for logprobs in completion.logprobs or []:
            best = sorted((entry.logprob for entry in logprobs.values()), reverse=True)
            margins.append(best[0] - best[1] if len(best) > 1 else math.inf)
        return cls(list(completion.token_ids), margins)


@dataclass(frozen=True)
class Comparison:
    """A comparison of an arm's answers with the first arm's, ``against``. `tokens`: for each other
    answer, the place of its first different token. `margins`: how far the first arm's best token
    was above its next there, in nats."""

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
        tokens, margins = [], []
        for mine, reference in zip(found, wanted, strict=True):
            pairs = enumerate(zip(mine.tokens, reference.tokens, strict=True))
            if (place := next((at for at, (a, b) in pairs if a != b), None)) is not None:
                tokens.append(place)
                margins.append(reference.margins[place])
        equal = len(wanted) - len(tokens)
        compared.append(Comparison(arm, against, len(wanted), equal, tokens, margins))
    return compared

"""Requests to tiny models that drafters are tested with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.support.engines.pairs import Request

TEXTS = [
    "def main(argv):\n    return",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "x = [int(y) for y in z]",
    "The quick brown fox jumps over the lazy dog. " * 2 + "And then?",
]
"""Two of them begin alike, so that prefixes are found again."""


def greedy(tokens: int, texts: Sequence[str] = TEXTS) -> list[Request]:
    """Ask for so many tokens of each text, greedily."""
    return [Request(text, {"max_tokens": tokens, "temperature": 0}) for text in texts]


def seeded(tokens: int, texts: Sequence[str] = TEXTS) -> list[Request]:
    """Ask for so many tokens of each text, with a seed."""
    return [Request(text, {"max_tokens": tokens, "seed": 7}) for text in texts]


def shortened(request: Request, tokens: int) -> Request:
    """The same request for so many tokens."""
    return replace(request, params={**request.params, "max_tokens": tokens})

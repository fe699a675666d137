"""Engines on a CPU whose draft predicts a block of positions, requests to them, and a fixture."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers.text_requests import greedy, seeded
from tests.support.engines.pairs import Answer, Pair, answer_all

FROM_LAST = 0.4
"""How much the last token counts to the target: what DFlash has no term for."""

TEXTS = [
    "def main(argv):\n    return [int(x) for x in argv]",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "x = [int(y) for y in z if y is not None]",
]

_TOKENS = 19
GREEDY = greedy(_TOKENS, TEXTS)
SEEDED = seeded(_TOKENS, TEXTS)


def block_engine(
    folder: Path, draft: str, method: str, **options: Any
) -> contextlib.AbstractContextManager[Any]:
    """An engine of the folder's target and of one of its drafts, with options of `Pair.engine`."""
    pair = Pair(str(folder / "target"), str(folder / draft), TEXTS)
    return pair.engine(method=method, **options)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Answer]:
    """What the target answers without drafts, to greedy and to seeded requests."""
    with Pair(str(folder / "target"), "", TEXTS).engine() as llm:
        return answer_all(llm, GREEDY + SEEDED)

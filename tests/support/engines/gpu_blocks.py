"""Tests on a device of drafts that predict a block: requests, fixtures, and a comparison."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.answers.text_requests import greedy, seeded
from tests.support.engines.block_engines import FROM_LAST, TEXTS
from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.pairs import Answer, answer_all
from tests.support.models.block_drafts import write_block_target

_TOKENS = 40
GREEDY = greedy(_TOKENS, TEXTS)
SEEDED = seeded(_TOKENS, TEXTS)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that block drafts can be right about."""
    return write_block_target(tmp_path_factory.mktemp("target"), from_last=FROM_LAST)


@pytest.fixture(scope="module")
def alone(target: Path) -> list[Answer]:
    """What the target answers without drafts, to greedy and to seeded requests."""
    with exact_engine(target) as llm:
        return answer_all(llm, GREEDY + SEEDED)


def share_alike(found: Sequence[Answer], expected: Sequence[Answer], tokens: int) -> float:
    """The share of equal tokens among the first `tokens` of each answer."""
    pairs = [
        pair
        for ours, theirs in zip(found, expected, strict=True)
        for pair in zip(ours.tokens[0][:tokens], theirs.tokens[0][:tokens])
    ]
    return sum(a == b for a, b in pairs) / len(pairs)

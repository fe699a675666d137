"""Fixtures: the device, the pair, requests to it, and the answers of the target alone."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers.text_requests import in_pairs
from tests.support.engines.pairs import Answer, Pair, Request, answer_all
from tests.support.engines.shipped_pair import SHIPPED

PROMPTS = 4
TOKENS = 16


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
ON_CPU = pytest.mark.parametrize("device", ["cpu"], scope="module")
ON_CUDA = pytest.mark.parametrize("device", [CUDA], scope="module")


def params(
    cpu: Sequence[tuple[Any, ...]] = (),
    nightly: Sequence[tuple[Any, ...]] = (),
    cuda: Sequence[tuple[Any, ...]] = (),
) -> list[Any]:
    """Values of a test's parameters behind the device that has them; some on a CPU are nightly."""
    return [
        *(pytest.param("cpu", *values) for values in cpu),
        *(pytest.param("cpu", *values, marks=pytest.mark.nightly) for values in nightly),
        *(pytest.param("cuda", *values, marks=pytest.mark.gpu) for values in cuda),
    ]


@pytest.fixture(scope="module", params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    """Where the engines of a test are, which runs on both."""
    return str(request.param)


@pytest.fixture(scope="session")
def pair() -> Pair:
    """The pair in the repository, or the one in ``$GRAFT_PAIR``, of the same folder layout."""
    return Pair.load(Path(os.environ.get("GRAFT_PAIR", SHIPPED)))


@pytest.fixture(scope="session")
def samples(pair: Pair) -> list[Request]:
    """A greedy and a seeded request of each prompt, next to each other: they share a prefix."""
    return in_pairs(TOKENS, pair.prompts[:PROMPTS])


@pytest.fixture(scope="session")
def expected(pair: Pair, samples: list[Request]) -> list[Answer]:
    """The answers of the target alone to `samples`."""
    with pair.engine() as llm:
        return answer_all(llm, samples)

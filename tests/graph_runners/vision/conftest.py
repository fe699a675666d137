"""The state of one rank, and tiny towers of vLLM's models."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.vision import towers


@pytest.fixture(scope="module")
def rank() -> Iterator[None]:
    """The distributed state that layers read while they are built and run."""
    with towers.engine_state():
        yield


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3"])
def kind(request: pytest.FixtureRequest, rank: None) -> str:
    """One of vLLM's models: qwen2_5 has windowed attention, qwen3 has deepstack mergers."""
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str) -> Any:
    return towers.make_model(kind)

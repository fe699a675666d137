"""One rank's state, vLLM's tiny towers, and their runners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from vllm_graft.testing.models import towers


@pytest.fixture(scope="module")
def rank() -> Iterator[None]:
    """What layers ask for while they are built and run."""
    with towers.engine_state():
        yield


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3"])
def kind(request: pytest.FixtureRequest, rank: None) -> str:
    """Which of vLLM's models: windowed attention, or deepstack."""
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str) -> Any:
    return towers.make_model(kind)

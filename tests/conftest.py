"""Fixtures that tests of several rooms share."""

from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def lone_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide the distributed state that vLLM's graph managers ask for, without an engine."""
    from vllm.v1.worker.gpu import cudagraph_utils

    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    platform = SimpleNamespace(get_global_graph_pool=lambda: "pool")
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)


@pytest.fixture
def tests_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that a test spawns import `tests.support`; they inherit the path."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])

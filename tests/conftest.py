"""Fixtures that tests of several rooms share."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


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


@pytest.fixture(autouse=True)
def _quick_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save engines time; tests of kernels, and engines that may be slow, interpret it all."""
    marked = request.node.get_closest_marker
    if marked("engine") and not marked("slow") and not torch.cuda.is_available():
        from tests.support.engines.quick_kernels import quicken

        quicken(monkeypatch.setattr)

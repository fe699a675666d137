"""What tests of several rooms need."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture
def lone_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's graph managers ask of an engine, where there is none."""
    from vllm.v1.worker.gpu import cudagraph_utils

    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    platform = SimpleNamespace(get_global_graph_pool=lambda: "pool")
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)

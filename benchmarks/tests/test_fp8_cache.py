"""The benchmark of FP8 caches compares two conversions over the same keys; figures need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import fp8_cache
from benchmarks.attention import own_calls
from benchmarks.attention.shapes import KvLayer
from vllm_graft.spec_decode.attention.choice import Point
from vllm_graft.spec_decode.kernels.attention import e4m3, tree_attention
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace


@pytest.mark.parametrize("differs", [False, True])
def test_conversions_are_compared(differs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_cache, "FORMS", {"plain": e4m3.PLAIN, "again": e4m3.PLAIN})
    monkeypatch.setattr(fp8_cache, "CALLS", 1)
    called: list[Any] = []
    triton = own_calls.triton

    def spoilt(*given: Any) -> own_calls.Calls:
        [call] = triton(*given)
        return [lambda: call() + (differs and len(called) == 2)]

    monkeypatch.setattr(own_calls, "triton", spoilt)

    def timer(call: Callable[[], object]) -> float:
        call()
        called.append(vars(tree_attention)["conversion"])
        return float(len(called))

    layer = KvLayer("full", 2, 1, 16)
    space = AttentionWorkspace.allocate(1, 4, 2, 16, 4, "cpu")
    times, same = fp8_cache.measure(layer, Point(1, 4, 40), space, timer, "cpu", 0)
    assert times == {"bf16": 1.0, "plain": 2.0, "again": 3.0}
    assert same is not differs
    assert called[0] is e4m3.conversion is vars(tree_attention)["conversion"] is not called[1]

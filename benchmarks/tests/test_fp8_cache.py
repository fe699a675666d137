"""The benchmark of FP8 caches compares what its arms compute; its figures need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import fp8_cache
from benchmarks.attention import own_calls
from benchmarks.attention.shapes import KvLayer
from vllm_graft.spec_decode.kernels.attention import e4m3
from vllm_graft.spec_decode.kernels.attention.e4m3 import HALVES, PRODUCTS, Native
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.targets.dense.choice import Point

ARMS = ["today", "converted", "halves", "products:128x128"]


def test_an_arm_is_how_kernels_take_e4m3() -> None:
    assert fp8_cache.arguments_of([]).arms == fp8_cache.ARMS
    found = {arm: fp8_cache.native_of(arm) for arm in fp8_cache.ARMS}
    assert found["today"] is found["converted"] is None
    assert found["halves"] == Native(HALVES)
    assert found["products:64"] == Native(PRODUCTS, 64, 64)
    assert found["halves:64x128"] == Native(HALVES, 64, 128)
    assert found["products:128x128"] == Native(PRODUCTS, 128, 128)
    assert len(set(found.values())) == len(found) - 1
    with pytest.raises(SystemExit):
        fp8_cache.arguments_of(["--arms", "quarters"])


@pytest.mark.parametrize("spoilt", [None, "halves"])
def test_arms_are_compared(spoilt: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_cache, "CALLS", 1)
    taken: list[Any] = []
    calls_of = fp8_cache.calls_of

    def changed(arm: str, *given: Any) -> own_calls.Calls:
        [call] = calls_of(arm, *given)
        return [lambda: call() * (1.1 if arm == spoilt else 1)]

    monkeypatch.setattr(fp8_cache, "calls_of", changed)

    def timer(call: Callable[[], object]) -> float:
        call()
        taken.append(e4m3.NATIVE)
        return float(len(taken))

    layer = KvLayer("full", 2, 1, 16)
    space = AttentionWorkspace.allocate(1, 4, 2, 16, 4, "cpu")
    point = Point(1, 4, 40)
    times, differences = fp8_cache.measure(layer, point, space, timer, ARMS, "cpu", 0)
    assert list(times) == ["bf16", *ARMS]
    assert list(times.values()) == [1, 2, 3, 4, 5]
    # What is in force while an arm is timed, as a graph is captured then.
    assert taken == [e4m3.NATIVE, *map(fp8_cache.native_of, ARMS)]
    assert differences["today"] == differences["converted"] == 0
    wrong = [arm for arm, value in differences.items() if not value <= fp8_cache.TOLERANCE]
    assert wrong == ([spoilt] if spoilt else [])

"""What a start took, by part, and which kernels were compiled in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.spec_decode.startup.clock import PARTS, StartClock


@pytest.fixture
def knobs() -> Iterator[Any]:
    """Triton's knobs, whose listener comes back."""
    from triton import knobs

    before = knobs.compilation.listener
    yield knobs
    knobs.compilation.listener = before


def told(module: str, seconds: float, *, cache_hit: bool) -> dict[str, Any]:
    """What Triton tells its listener of a kernel."""
    times = SimpleNamespace(total=seconds * 1e6)
    source = SimpleNamespace(fn=SimpleNamespace(module=module))
    rest = {"metadata": {}, "metadata_group": {}}
    return {"src": source, "times": times, "cache_hit": cache_hit, **rest}


def test_compiling_counts_towards_no_other_part() -> None:
    clock = StartClock()
    with clock.part("attention"):
        time.sleep(0.05)
        clock.count(**told("vllm_graft.spec_decode.kernels.finish", 20.0, cache_hit=False))
    assert clock.seconds["compile"] == 20
    assert clock.seconds["attention"] == 0
    # Control: without it, the part takes what it takes.
    with clock.part("attention"):
        time.sleep(0.05)
    assert clock.seconds["attention"] >= 0.05
    assert tuple(clock.seconds) == PARTS


def test_a_part_that_fails_is_timed_too() -> None:
    clock = StartClock()
    with pytest.raises(RuntimeError), clock.part("wait"):
        raise RuntimeError
    assert clock.seconds["wait"] > 0


def test_our_kernels_are_told_from_others(knobs: Any) -> None:
    before: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **others: before.append(cache_hit)
    clock = StartClock()
    clock.listen()
    for module in ("vllm_graft.spec_decode.kernels.walk", "vllm.v1.sample.ops", "__main__"):
        for cache_hit in (True, False, False):
            knobs.compilation.listener(**told(module, 1.0, cache_hit=cache_hit))
    assert (clock.compiled, clock.loaded) == (2, 1)
    assert clock.seconds["compile"] == 9
    # Who listened before hears the same.
    assert before == [True, False, False] * 3


def test_the_log_says_what_took_how_long(caplog: pytest.LogCaptureFixture) -> None:
    clock = StartClock()
    clock.seconds["draft_graphs"] = 3.26
    clock.count(**told("vllm_graft.x", 1.0, cache_hit=True))
    with caplog.at_level("INFO", "vllm.graft"):
        clock.log()
    [line] = caplog.messages
    assert "draft_graphs 3.3" in line
    assert "compile 1.0" in line
    assert "0 of its kernels were compiled in this process, 1 found in Triton's cache" in line

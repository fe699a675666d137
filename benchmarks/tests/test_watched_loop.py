"""What a watched loop tells beside a rate."""

from __future__ import annotations

import pytest

from benchmarks.watched_loop import Watched, WatchedLoop
from tests.support.engines.counting_engine import Clock, Engine, Llm, counters
from vllm_graft.bench.common import closed_loop
from vllm_graft.bench.common.closed_loop import Case


def test_tokens_in_flight_and_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    engine = Engine(clock)
    monkeypatch.setattr(closed_loop, "time", clock)
    monkeypatch.setattr("vllm_graft.testing.spec_metrics", counters)
    loop = WatchedLoop(Llm(engine), ["a", "b", "c"])

    def measured(first: int = 0) -> Watched:
        found = loop.measure(Case(0.0, 2, 6, 40, first=first))
        assert isinstance(found, Watched)
        return found

    found = measured()
    assert [found.rate, found.acceptance] == pytest.approx([40.0, 2.0])
    # Two prompts have 10 tokens each, and their answers up to 40.
    assert 2 * 12 < found.held < 2 * 50
    assert found.nodes == {}
    # The next measurement has the same prompts and seeds.
    assert measured().sent == found.sent
    assert measured(first=1).sent != found.sent

"""The benchmark of bursts, run through on a tiny engine, whose figures mean nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import bursts
from benchmarks.engine_processes import Plan, engine_options, running
from tests.support.engines.pairs import Pair
from tests.support.engines.shipped_pair import SHIPPED


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_burst_has_a_time_for_each_request_and_the_steps_with_its_prompts() -> None:
    from vllm import SamplingParams

    prompts = Pair.load(SHIPPED).prompts[:3]
    options = {"tree": {"topk": 4, "steps": 3}, "max_num_seqs": 4}
    plan = Plan(SHIPPED / "target", SHIPPED / "eagle3", prompts, [3], 0.0, 4, options)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with running(plan, engine_options("tree:7", plan)) as llm:
        tokens = sum(len(ids) for ids in llm.get_tokenizer()(prompts).input_ids)
        found = bursts.burst(llm.llm_engine, prompts, params, 0.001, "a")
    assert len(found.first_tokens) == 3
    assert all(time > 0 for time in found.first_tokens)
    assert sum(step.rows for step in found.steps) >= tokens
    assert found.steps[0].at >= 0


def test_requests_arrive_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is asked for steps in between, and each request counts from its own arrival."""
    clock = 100.0
    waiting: list[str] = []

    class Engine:
        def __init__(self) -> None:
            scheduler = SimpleNamespace(schedule=lambda: output(7 * len(waiting)))
            self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))

        def has_unfinished_requests(self) -> bool:
            return bool(waiting)

        def add_request(self, name: str, prompt: str, params: Any) -> None:
            waiting.append(name)

        def step(self) -> list[Any]:
            nonlocal clock
            self.engine_core.engine_core.scheduler.schedule()
            clock += 0.010
            done, waiting[:] = list(waiting), []
            return [
                SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[1])])
                for name in done
            ]

    def output(rows: int) -> Any:
        return SimpleNamespace(total_num_scheduled_tokens=rows)

    monkeypatch.setattr("benchmarks.bursts.time", SimpleNamespace(perf_counter=lambda: clock))
    found = bursts.burst(Engine(), ["p", "q", "r"], None, 0.004, "a")
    # The first one has the engine to itself; the others come 4 and 8 ms later and wait for it.
    assert found.first_tokens == pytest.approx([10, 16, 12])
    assert [(step.at, step.rows) for step in found.steps] == [(0.0, 7), (10.0, 14)]


def test_a_row_tells_of_the_burst_with_the_median_last_token() -> None:
    steps = [bursts.Step(0.0, 9)]
    found = [bursts.Burst([1.0, last], steps * number) for number, last in enumerate((30, 10, 20))]
    row = bursts.summary("none", 2, found)
    assert (row.median, row.p99, row.last) == (5.5, 30.0, 20.0)
    assert row.steps == steps * 2
    assert "| none" in bursts.table([row])
    assert "0: 9, 0: 9" in bursts.table([row])

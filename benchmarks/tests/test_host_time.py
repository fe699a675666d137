"""The benchmark of host time, run through on a tiny engine, whose figures mean nothing."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import host_time
from benchmarks.bars.host_clock import PARTS, WARM_UP, Watch
from benchmarks.engine_processes import Plan, engine_options, running
from tests.support.shipped_pair import SHIPPED
from vllm_graft.testing.pairs import Pair


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "target": SHIPPED / "target",
        "draft": SHIPPED / "eagle3",
        "prompts": Pair.load(SHIPPED).prompts,
        "batches": [1],
        "temperature": 0.0,
        "tokens": 14,
        "options": {"tree": {"topk": 4, "steps": 3}, "max_num_seqs": 4},
    }
    return Plan(**{**values, **changes})


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_every_part_of_a_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "WARM_UP", 1)
    with running(plan(), engine_options("tree:7", plan())) as llm:
        (row,) = host_time.measure("tree:7", plan(), llm)
    assert row.steps >= 2
    assert all(row.median[part] > 0 for part in (*PARTS, "host"))
    # Drafting is a part of `sample`, which follows the target's pass.
    assert row.median["propose"] < row.median["sample"] < row.median["host"]


def step(counts: dict[str, int], drafts: dict[str, int], new: int = 0) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        scheduled_spec_decode_tokens={name: [-1] * count for name, count in drafts.items()},
        scheduled_new_reqs=[None] * new,
    )


class Engine:
    """An engine whose steps take the times that it is given."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(
            schedule=lambda: None, update_from_output=lambda output: time.sleep(0.002)
        )
        runner: Any = SimpleNamespace(
            execute_model=lambda output: time.sleep(0.004),
            sample_tokens=lambda: runner.speculator.propose(),
            speculator=SimpleNamespace(propose=lambda: time.sleep(0.001)),
        )
        worker = SimpleNamespace(model_runner=runner)
        self.model_executor = SimpleNamespace(driver_worker=worker)

    def run(self, output: Any) -> None:
        runner = self.model_executor.driver_worker.model_runner
        self.scheduler.schedule()
        runner.execute_model(output)
        runner.sample_tokens()
        self.scheduler.update_from_output(output)


def test_steps_with_prompts_are_left_out() -> None:
    engine, watch = Engine(), Watch()
    with watch.watching(engine, 2) as steps:
        engine.run(step({"a": 4, "b": 4}, {"a": 3, "b": 3}, new=1))
        engine.run(step({"a": 4, "b": 30}, {"a": 3}))
        engine.run(step({"a": 4}, {"a": 3}))
        for _ in range(12):
            engine.run(step({"a": 4, "b": 1}, {"a": 3}))
    assert len(steps) == 12
    row = host_time.summary("tree:3", 2, steps)
    assert row.steps == 12 - WARM_UP
    parts = row.median
    assert parts["execute"] >= 4000
    assert parts["update"] >= 2000
    assert parts["sample"] >= parts["propose"] >= 1000
    assert parts["host"] >= parts["execute"] + parts["update"] + parts["sample"] - 100
    # The engine's methods are restored.
    engine.run(step({"a": 4, "b": 4}, {"a": 3, "b": 3}))
    assert len(steps) == 12


def test_too_few_steps_say_so() -> None:
    with pytest.raises(RuntimeError, match="--tokens"):
        host_time.summary("chain:5", 1, [])


def test_arms() -> None:
    options = engine_options("auto:31", plan())
    assert options["additional_config"]["graft"]["tree"] == {
        "topk": 4, "steps": 3, "recurrent": True, "shape": "auto",
    }  # fmt: skip
    ranged = engine_options("tree:31@[[1,4,31],[5,9,4]]", plan())["speculative_config"]
    assert ranged["num_speculative_tokens"] == 31
    assert ranged["num_speculative_tokens_per_batch_size"] == [[1, 4, 31], [5, 9, 4]]
    assert "additional_config" not in engine_options("chain:5", plan())
    with pytest.raises(SystemExit, match="'none'"):
        engine_options("none", plan())


def test_table() -> None:
    times = dict.fromkeys((*PARTS, "host"), 100.0)
    rows = [
        host_time.Row("chain:5", 1, 50, times, times),
        host_time.Row("tree:31", 1, 50, {**times, "host": 104.0}, times),
    ]
    lines = host_time.table(rows).splitlines()
    assert lines[0].startswith("| batch | arm | steps | schedule µs |")
    assert lines[3].endswith("| 104 (100) | 1.04 |")

"""The worker's report: on which results it goes, how often, and what it costs in between."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.plugin.metrics.stand_ins import AsyncOutput, Clock, Output, Scheduled
from vllm_graft.base import info, log
from vllm_graft.metrics.worker_report import SECONDS, WorkerReport, report_of

EMPTY = Output()
"""As vLLM's, one object for all steps without tokens."""


class Runner:
    """A model runner of vLLM's."""

    def __init__(self, result: Any = None) -> None:
        self.result = result

    def execute_model(self, scheduled: Scheduled, dummy_run: bool = False) -> Any:
        return None if scheduled.total_num_scheduled_tokens else EMPTY

    def sample_tokens(self, grammar: Any = None) -> Any:
        return self.result if self.result is not None else Output(["a"])


class Toy:
    """A part that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.declined = {"late": 1}

    def numbers(self) -> dict[str, Any]:
        self.asked += 1
        return {"done": self.asked, "no": self.declined}


@pytest.fixture
def toy() -> Iterator[Toy]:
    info.clear()
    log.warning_once.cache_clear()
    part = Toy()
    info.publish("toy", dict, part.numbers)
    yield part
    info.clear()


def attached(result: Any = None) -> tuple[Runner, Clock, WorkerReport]:
    runner, clock = Runner(result), Clock()
    report = WorkerReport(clock)
    report.attach(runner)
    return runner, clock, report


def test_a_report_holds_the_parts_their_numbers_and_failures(toy: Toy) -> None:
    runner, _, _ = attached()
    found = report_of(runner.sample_tokens())
    numbers = {"toy": {"done": 1, "no": {"late": 1}}}
    assert found == {"on": ["toy"], "declined": {}, "errors": 0, "numbers": numbers}
    # It leaves the process in another thread.
    toy.declined["full"] = 9
    assert found["numbers"]["toy"]["no"] == {"late": 1}


def test_the_parts_are_asked_once_per_second_and_not_per_step(toy: Toy) -> None:
    """This bounds the cost: all other steps look at the clock and copy nothing."""
    runner, clock, _ = attached()
    carried = 0
    for _ in range(500):
        assert runner.execute_model(Scheduled(5)) is None
        carried += report_of(runner.sample_tokens()) is not None
        clock.now += SECONDS / 100
    assert toy.asked == carried == 5


def test_a_step_without_tokens_reports_whatever_the_clock_says(toy: Toy) -> None:
    runner, _, _ = attached()
    runner.sample_tokens()
    last = runner.execute_model(Scheduled(0))
    assert report_of(last) is not None
    assert toy.asked == 2
    # vLLM's one empty output is not written to.
    assert report_of(EMPTY) is None


def test_a_dummy_run_does_not_report(toy: Toy) -> None:
    runner, _, _ = attached()
    assert report_of(runner.execute_model(Scheduled(0), dummy_run=True)) is None


@pytest.mark.parametrize("name", ["model_runner_output", "_model_runner_output"])
def test_an_asynchronous_result_carries_it_without_a_circle(toy: Toy, name: str) -> None:
    result = AsyncOutput(**{name: Output(["a"])})
    runner, _, _ = attached(result)
    assert runner.sample_tokens() is result
    assert report_of(result.get_output()) is not None
    # Its device tensors go when vLLM drops it, not at a garbage collection.
    assert set(vars(result)) == {"model_runner_output", "_model_runner_output"}


def test_hidden_states_for_another_stage_are_left_alone(toy: Toy) -> None:
    tensors = {"hidden_states": 0}
    runner, _, _ = attached(tensors)
    assert runner.sample_tokens() is tensors


def test_a_part_that_fails_costs_numbers_and_no_step(
    toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    runner, clock, report = attached()

    def fail() -> dict[str, Any]:
        raise RuntimeError("out of paper")

    info.publish("toy", dict, fail)
    for _ in range(3):
        assert runner.sample_tokens() == Output(["a"])
    assert report.errors == 3
    assert [record.message for record in caplog.records] == [
        "a worker's metrics are incomplete: RuntimeError: out of paper"
    ]
    info.publish("toy", dict, toy.numbers)
    clock.now += SECONDS
    found = report_of(runner.sample_tokens())
    assert found is not None
    assert found["errors"] == 3


def test_attaching_again_reports_once(toy: Toy) -> None:
    runner, _, report = attached()
    report.attach(runner)
    runner.sample_tokens()
    assert toy.asked == 1

"""The relay in the engine core: what it sends, when, and that nothing is lost or sent twice."""

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.plugin.metrics.stand_ins import (
    METRICS,
    ROWS,
    Clock,
    EngineOutputs,
    Output,
    Stats,
    StepCount,
)
from vllm_graft.base import log
from vllm_graft.base.metric import PartMetrics
from vllm_graft.metrics.relay import KEY, SECONDS, STATES_SECONDS, Relay
from vllm_graft.metrics.worker_report import ATTRIBUTE

TOLD = [["toy", "on", "toys"]]


def make_relay(workers: Any = ()) -> tuple[Relay, Clock]:
    clock = Clock()
    return Relay(METRICS, lambda found: TOLD, workers, clock=clock), clock


def carrying(**numbers: Any) -> Output:
    output = Output(["a"])
    report = {"on": ["toy"], "declined": {}, "errors": 0, "numbers": {"toy": numbers}}
    setattr(output, ATTRIBUTE, report)
    return output


def sent(relay: Relay, output: Output | None = None, **stats: Any) -> dict[str, Any]:
    """What one step sends, which is something."""
    found = message(relay, output, **stats)
    assert found is not None
    return found


def message(relay: Relay, output: Output | None = None, **stats: Any) -> dict[str, Any] | None:
    outputs = {1: EngineOutputs(Stats(**stats))}
    relay.step(output or Output(), outputs)
    found = outputs[1].scheduler_stats.kv_connector_stats
    return found and found.get(KEY)


def test_the_first_step_tells_numbers_and_later_ones_wait() -> None:
    relay, clock = make_relay()
    assert message(relay, carrying(done=4)) == {
        "news": {"toy": {"done": 4, "seen": 1, "sizes": {"3": 1}}},
        "states": TOLD,
    }
    assert message(relay, carrying(done=6)) is None
    clock.now += SECONDS
    assert message(relay) == {"news": {"toy": {"done": 2, "seen": 2, "sizes": {"3": 2}}}}


def test_an_idle_engine_tells_at_once() -> None:
    relay, _ = make_relay()
    message(relay)
    assert message(relay) is None
    assert message(relay, num_waiting_reqs=1, num_running_reqs=0) is None
    news = sent(relay, carrying(done=1), num_running_reqs=0)["news"]
    assert news["toy"] == {"done": 1, "seen": 3, "sizes": {"3": 3}}


def test_a_worker_in_this_process_is_asked_when_a_message_goes() -> None:
    asked: list[int] = []

    def local() -> dict[str, Any]:
        asked.append(1)
        return {"on": [], "declined": {}, "errors": 0, "numbers": {"toy": {"done": len(asked)}}}

    relay = Relay(METRICS, lambda found: TOLD, (), local, Clock())
    found = [message(relay) for _ in range(5)]
    found.append(message(relay, num_running_reqs=0))
    assert len(asked) == 2
    assert [each and each["news"]["toy"]["done"] for each in found] == [1, *[None] * 4, 1]


def test_others_statistics_stay_beside_ours() -> None:
    relay, _ = make_relay()
    theirs = {"pages": 3}
    stats = Stats(kv_connector_stats=theirs)
    relay.step(Output(), {0: EngineOutputs(stats)})
    assert stats.kv_connector_stats is not None
    assert stats.kv_connector_stats.keys() == {"pages", KEY}
    # vLLM may keep the connector's mapping.
    assert theirs == {"pages": 3}


def test_a_step_without_statistics_loses_nothing() -> None:
    relay, clock = make_relay()
    relay.step(carrying(done=4), {})
    relay.step(carrying(done=5), {0: EngineOutputs(None)})
    clock.now += SECONDS
    assert sent(relay)["news"]["toy"]["done"] == 5


def test_the_states_are_told_before_the_first_step_and_every_minute() -> None:
    relay, clock = make_relay(workers=[{"on": ["toy"], "declined": {}}])
    assert relay.first_message() == {"states": TOLD}
    assert "states" not in sent(relay)
    clock.now += STATES_SECONDS
    assert sent(relay)["states"] == TOLD


def test_without_workers_there_is_no_first_message() -> None:
    relay, _ = make_relay()
    assert relay.first_message() is None


def test_a_failure_is_counted_and_costs_no_step(caplog: pytest.LogCaptureFixture) -> None:
    log.warning_once.cache_clear()
    relay, clock = make_relay()
    broken = Output()
    setattr(broken, ATTRIBUTE, {"numbers": None})
    for _ in range(2):
        assert message(relay, broken) is None
    assert [record.message for record in caplog.records] == [
        "an engine's metrics are incomplete: KeyError: 'errors'"
    ]
    assert sent(relay)["errors"] == {"engine": 2}
    failed = carrying(done=1)
    getattr(failed, ATTRIBUTE)["errors"] = 5
    clock.now += SECONDS
    assert sent(relay, failed)["errors"] == {"worker": 5}


def test_a_part_that_cannot_count_leaves_the_others_theirs() -> None:
    class Broken(StepCount):
        def numbers(self) -> Any:
            raise RuntimeError("out of paper")

    metrics = {"broken": PartMetrics(ROWS, Broken), **METRICS}
    relay = Relay(metrics, lambda found: TOLD, (), clock=Clock())
    found = sent(relay)
    assert found["news"] == {"toy": {"seen": 1, "sizes": {"3": 1}}}
    assert found["errors"]["engine"] == 1


def test_a_scheduler_is_looked_at_once() -> None:
    relay, _ = make_relay()
    made = {0: EngineOutputs(Stats())}
    scheduler = SimpleNamespace(update_from_output=lambda scheduled, output: made)
    relay.attach(scheduler)
    relay.attach(scheduler)
    assert scheduler.update_from_output("scheduled", carrying(done=2)) is made
    news = made[0].scheduler_stats.kv_connector_stats[KEY]["news"]
    assert news["toy"]["seen"] == 1


def run(relay: Relay, clock: Clock, steps: int) -> tuple[Counter[str], int, int]:
    """What is told in random steps, and what was counted: done, and steps with statistics."""
    numbers = random.Random(5)
    told: Counter[str] = Counter()
    done = seen = 0
    for step in range(steps):
        done += numbers.randrange(4)
        clock.now += numbers.random() / 3
        output = carrying(done=done) if numbers.random() < 0.3 or step == steps - 1 else Output()
        running = 0 if step == steps - 1 else numbers.randrange(3)
        if numbers.random() < 0.2 and step < steps - 1:
            relay.step(output, {})
            continue
        seen += 1
        found = message(relay, output, num_running_reqs=running) or {}
        news = found.get("news", {}).get("toy", {})
        told.update({"done": news.get("done", 0), "seen": news.get("seen", 0)})
    return told, done, seen


def test_what_is_told_adds_up_once_the_engine_is_idle() -> None:
    relay, clock = make_relay()
    told, done, seen = run(relay, clock, 300)
    assert told == {"done": done, "seen": seen}


def test_a_relay_that_loses_a_message_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    relay, clock = make_relay()
    real = relay._message
    dropped: list[Any] = []

    def drop_first(now: float) -> dict[str, Any]:
        found = real(now)
        if not dropped:
            dropped.append(found)
            return {}
        return found

    monkeypatch.setattr(relay, "_message", drop_first)
    told, done, seen = run(relay, clock, 300)
    assert told != {"done": done, "seen": seen}

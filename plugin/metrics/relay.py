"""The engine core's side: what was counted goes to the frontend with vLLM's statistics of a step.

vLLM gives the frontend a ``SchedulerStats`` with most steps. Its field for a KV connector's
statistics is a mapping of anything, in which ours stand under a key of their own; the frontend
takes them out first. They are increments, so that it does not matter which of several API servers
gets them: Prometheus adds up what all of them count."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm_graft.base.log import warning_once
from vllm_graft.base.metric import Kind, Metric, Number, Numbers, PartMetrics, Watch
from vllm_graft.base.values import reason_of
from vllm_graft.metrics.part_states import State
from vllm_graft.metrics.worker_report import report_of
from vllm_graft.seams.wrap import around

KEY = "vllm_graft"
"""Our key among a KV connector's statistics."""

SECONDS = 1.0
"""Least time between two messages, unless the engine becomes idle."""

STATES_SECONDS = 60.0
"""Time after which the parts' states are sent again, to a frontend that may be a new one."""

WORKER, ENGINE = "worker", "engine"
ERRORS = (Metric("errors", Kind.COUNTER, "Failures to count, by process.", label="process"),)

News = dict[str, Number | dict[str, Number]]
"""Like `Numbers`: increments of counters and histograms, and gauges that have changed."""


class Increments:
    """Remembers a part's numbers, and says what has changed, of those that a row names."""

    def __init__(self, rows: Iterable[Metric]) -> None:
        self._kinds = {row.key: row.kind for row in rows}
        self._known: dict[str, dict[str, Number]] = {}

    def take(self, numbers: Numbers) -> News:
        """What has changed since the last call; empty if nothing has. A counter that is lower than
        before has begun anew, in a process that was started again. Its whole value is then new."""
        news: News = {}
        for key in self._kinds.keys() & numbers.keys():
            found = numbers[key]
            if isinstance(found, Mapping):
                if changed := self._changed(key, found):
                    news[key] = changed
            elif changed := self._changed(key, {"": found}):
                news[key] = changed[""]
        return news

    def _changed(self, key: str, found: Mapping[str, Number]) -> dict[str, Number]:
        known = self._known.setdefault(key, {})
        changed: dict[str, Number] = {}
        for label, value in found.items():
            before = known.get(label, 0)
            if self._kinds[key] is Kind.GAUGE:
                if value != before or label not in known:
                    changed[label] = value
            elif new := value - before if value >= before else value:
                changed[label] = new
            known[label] = value
        return changed


class Relay:
    """Adds up what the workers report and what is counted here, and sends it once per second.

    Args:
        metrics: those of the parts that are on, by the part's name.
        states: the parts' states, from the workers' reports.
        workers: what `info.states` said in each worker at the start; empty if nobody has asked.
        local: makes the report of a worker in this process; None if it has one of its own.
        clock: seconds, as `time.monotonic` has them.
    """

    def __init__(
        self,
        metrics: Mapping[str, PartMetrics],
        states: Callable[[Sequence[Mapping[str, Any]]], list[State]],
        workers: Sequence[Mapping[str, Any]] = (),
        local: Callable[[], Mapping[str, Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local, self._clock, self._states, self._workers = local, clock, states, list(workers)
        self._increments = {name: Increments(each.rows) for name, each in metrics.items()}
        self._watches: dict[str, Watch] = {
            name: each.watch() for name, each in metrics.items() if each.watch is not None
        }
        self._reported: Mapping[str, Numbers] = {}
        self._errors = {WORKER: 0, ENGINE: 0}
        self._errors_told = Increments(ERRORS)
        self._sent = self._told = float("-inf")

    def attach(self, scheduler: Any) -> None:
        @around(scheduler, "update_from_output")
        def then_relay(original: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
            engine_outputs = original(scheduler_output, model_runner_output)
            self.step(model_runner_output, engine_outputs)
            return engine_outputs

    def first_message(self) -> dict[str, Any] | None:
        """The parts' states, to send before the first step; None if they are not known yet."""
        return {"states": self._states_now(self._clock())} if self._workers else None

    def step(self, output: Any, engine_outputs: Mapping[int, Any]) -> None:
        """Take in a step's ``ModelRunnerOutput``; put a message into its statistics if one is due.
        ``engine_outputs`` is what goes to each API server. It never raises."""
        try:
            self._step(output, engine_outputs)
        except Exception as error:
            self._failed(error)

    def _step(self, output: Any, engine_outputs: Mapping[int, Any]) -> None:
        if (report := report_of(output)) is not None:
            self._take(report)
        found = (each.scheduler_stats for each in engine_outputs.values())
        stats = next((each for each in found if each is not None), None)
        if stats is None:
            return
        for watch in self._watches.values():
            watch.step(stats)
        idle = not (stats.num_running_reqs or stats.num_waiting_reqs)
        now = self._clock()
        if (idle or now - self._sent >= SECONDS) and (message := self._message(now)):
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), KEY: message}

    def _take(self, report: Mapping[str, Any]) -> None:
        self._reported, self._errors[WORKER] = report["numbers"], report["errors"]
        self._workers = self._workers or [report]

    def _message(self, now: float) -> dict[str, Any]:
        message: dict[str, Any] = {}
        if self._local is not None:
            self._take(self._local())
        for part, increments in self._increments.items():
            try:
                counted = self._watches[part].numbers() if part in self._watches else {}
                if news := increments.take({**self._reported.get(part, {}), **counted}):
                    message.setdefault("news", {})[part] = news
            except Exception as error:
                self._failed(error)
        if errors := self._errors_told.take({"errors": self._errors}):
            message["errors"] = errors["errors"]
        if self._workers and now - self._told >= STATES_SECONDS:
            message["states"] = self._states_now(now)
        self._sent = now
        return message

    def _failed(self, error: Exception) -> None:
        self._errors[ENGINE] += 1
        warning_once(f"an engine's metrics are incomplete: {reason_of(error)}")

    def _states_now(self, now: float) -> list[State]:
        self._told = now
        return self._states(self._workers)

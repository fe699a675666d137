"""Stand-ins for what vLLM hands from worker to engine core to frontend."""

import functools
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_graft.base.metric import Kind, Metric, Numbers, Origin, PartMetrics

ROWS = (
    Metric("seen", Kind.COUNTER, "Seen.", origin=Origin.ENGINE),
    Metric("sizes", Kind.HISTOGRAM, "Sizes.", origin=Origin.ENGINE, buckets=(1, 4)),
    Metric("done", Kind.COUNTER, "Done."),
    Metric("declined", Kind.COUNTER, "Declined.", source="no", label="reason", values=("late",)),
    Metric("room", Kind.GAUGE, "Room.", origin=Origin.ENCODER),
    Metric("far", Kind.COUNTER, "Far.", origin=Origin.CONNECTOR),
)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Output:
    """vLLM's ``ModelRunnerOutput``."""

    req_ids: list[str] = field(default_factory=list)


@dataclass
class AsyncOutput:
    """An ``AsyncModelRunnerOutput``, of Model Runner V2 or, with the other name, of V1."""

    model_runner_output: Any = None
    _model_runner_output: Any = None

    def get_output(self) -> Any:
        return self.model_runner_output or self._model_runner_output


@dataclass
class Scheduled:
    """vLLM's ``SchedulerOutput``."""

    total_num_scheduled_tokens: int = 1


@dataclass
class Stats:
    """vLLM's ``SchedulerStats``."""

    num_running_reqs: int = 1
    num_waiting_reqs: int = 0
    spec_decoding_stats: Any = None
    kv_connector_stats: dict[str, Any] | None = None


@dataclass
class EngineOutputs:
    """vLLM's ``EngineCoreOutputs`` for one API server."""

    scheduler_stats: Any = None


@dataclass
class StepCount:
    """A watch that counts steps, all of size 3."""

    steps: int = 0

    def step(self, stats: Any) -> None:
        self.steps += 1

    def numbers(self) -> Numbers:
        return {"seen": self.steps, "sizes": {"3": self.steps}}


METRICS = {"toy": PartMetrics(ROWS, StepCount)}


class Logger:
    """vLLM's ``PrometheusStatLogger``, over a registry of its own."""

    def __init__(self, engines: int = 1) -> None:
        self.registry = CollectorRegistry()
        self._counter_cls = functools.partial(Counter, registry=self.registry)
        self._gauge_cls = functools.partial(Gauge, registry=self.registry)
        self._histogram_cls = functools.partial(Histogram, registry=self.registry)
        self.per_engine_labelvalues = {n: ["model", str(n)] for n in range(engines)}

    @property
    def text(self) -> str:
        return generate_latest(self.registry).decode()

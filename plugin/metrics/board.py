"""The frontend's side: Prometheus series of the parts, beside vLLM's own and like them. vLLM's
``PrometheusStatLogger`` says of which classes its metrics are (Ray has others) and what its labels
are. Several API servers write their own shares to files, which ``/metrics`` adds up."""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_graft.base.log import warning_once
from vllm_graft.base.metric import PREFIX, Kind, Metric, Number, Origin
from vllm_graft.base.values import reason_of
from vllm_graft.base.version import __version__
from vllm_graft.metrics.part_states import State
from vllm_graft.metrics.relay import ENGINE, KEY, WORKER

FRONTEND = "frontend"

COMMON = (
    Metric(
        "info",
        Kind.GAUGE,
        "1 for what is so of each part: its state, and what runs or why it does not.",
        origin=Origin.ENGINE,
        label="part, state, detail, version",
    ),
    Metric(
        "metrics_errors",
        Kind.COUNTER,
        "Times that a process failed to count for these metrics. Requests are not affected.",
        origin=Origin.FRONTEND,
        label="process",
        values=(WORKER, ENGINE, FRONTEND),
    ),
)
"""Metrics that belong to no part. Their names follow `PREFIX` at once."""


class Series:
    """One metric: its children by engine, and by the value of its label. ``name`` is without
    ``_total``; ``logger`` is vLLM's ``PrometheusStatLogger``."""

    def __init__(self, row: Metric, name: str, logger: Any) -> None:
        self.kind = row.kind
        self._labels: dict[int, list[object]] = logger.per_engine_labelvalues
        named: dict[str, Any] = {
            "name": name,
            "documentation": row.help,
            "labelnames": ["model_name", "engine", *row.labels],
        }
        if row.kind is Kind.COUNTER:
            self._metric = logger._counter_cls(**named)
        elif row.kind is Kind.GAUGE:
            self._metric = logger._gauge_cls(**named, multiprocess_mode="mostrecent")
        else:
            self._metric = logger._histogram_cls(**named, buckets=row.buckets)
        self._children: dict[tuple[int, tuple[str, ...]], Any] = {}
        begun = [(value,) for value in row.values] if row.labels else [()]
        for engine in self._labels:
            for values in begun:
                self._child(engine, values)

    def take(self, engine: int, found: Number | Mapping[str, Number]) -> None:
        """Add what is new of a counter or a histogram, or set a gauge."""
        if self.kind is Kind.HISTOGRAM:
            assert isinstance(found, Mapping)
            child = self._child(engine, ())
            for value, times in found.items():
                for _ in range(int(times)):
                    child.observe(float(value))
        elif isinstance(found, Mapping):
            for value, number in found.items():
                self.put(engine, (value,), number)
        else:
            self.put(engine, (), found)

    def put(self, engine: int, values: tuple[str, ...], number: Number) -> None:
        child = self._child(engine, values)
        (child.set if self.kind is Kind.GAUGE else child.inc)(number)

    def _child(self, engine: int, values: tuple[str, ...]) -> Any:
        if (engine, values) not in self._children:
            child = self._metric.labels(*self._labels[engine], *values)
            self._children[engine, values] = child
        return self._children[engine, values]


class Board:
    """The series of all parts, by their names, that are on in the engines of one frontend."""

    def __init__(self, rows: Mapping[str, Iterable[Metric]], logger: Any) -> None:
        self._series = {
            (part, row.key): Series(row, f"{PREFIX}{part}_{row.name}", logger)
            for part, metrics in rows.items()
            for row in metrics
        }
        self._info, self._errors = (Series(row, f"{PREFIX}{row.name}", logger) for row in COMMON)
        self._states: dict[int, list[tuple[str, ...]]] = {}

    def record(self, stats: Any, engine: int) -> None:
        """Take our message out of vLLM's ``SchedulerStats``, if any, and count it; never raises."""
        try:
            if (message := taken_out(stats)) is not None:
                self._count(message, engine)
        except Exception as error:
            warning_once(f"a frontend's metrics are incomplete: {reason_of(error)}")
            self._errors.take(engine, {FRONTEND: 1})

    def _count(self, message: Mapping[str, Any], engine: int) -> None:
        if (states := message.get("states")) is not None:
            self._tell(states, engine)
        if (errors := message.get("errors")) is not None:
            self._errors.take(engine, errors)
        for part, news in message.get("news", {}).items():
            for key, found in news.items():
                if (series := self._series.get((part, key))) is not None:
                    series.take(engine, found)

    def _tell(self, states: Iterable[State], engine: int) -> None:
        told = [(*state, __version__) for state in states]
        for gone in self._states.get(engine, []):
            if gone not in told:
                self._info.put(engine, gone, 0)
        for values in told:
            self._info.put(engine, values, 1)
        self._states[engine] = told


def taken_out(stats: Any) -> dict[str, Any] | None:
    """Our message, which is no longer in the statistics afterwards; None if there was none."""
    found = None if stats is None else stats.kv_connector_stats
    if not found or KEY not in found:
        return None
    message: dict[str, Any] = found.pop(KEY)
    if not found:
        stats.kv_connector_stats = None
    return message

"""The frontend's side: Prometheus series of the parts, beside vLLM's own and like them. vLLM's
``PrometheusStatLogger`` says of which classes its metrics are (Ray has others) and what its labels
are. Several API servers write their own shares to files, which ``/metrics`` adds up."""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm_graft.base.log import warning_once
from vllm_graft.base.metric import PREFIX, Kind, Metric, Origin, Series
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

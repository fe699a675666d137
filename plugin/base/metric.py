"""What a part's metrics are: one row each, from which all of them are counted and described."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

PREFIX = "vllm:graft_"
"""What the name of every metric of ours begins with; ``vllm:`` is the prefix of vLLM's own."""

Number = int | float
Numbers = Mapping[str, Number | Mapping[str, Number]]
"""A part's numbers by the `source` of their rows; with a label, the numbers by its value."""


class Kind(Enum):
    """What Prometheus makes of a number."""

    COUNTER = "counter"
    """It grows while its process lives."""
    GAUGE = "gauge"
    """Its latest value counts."""
    HISTOGRAM = "histogram"
    """How often each value was seen, as a counter for each value."""


class Origin(Enum):
    """Who counts."""

    WORKER = "worker"
    """The rank whose output vLLM takes: one of the last stage of a pipeline."""
    ENCODER = "worker that encodes"
    """A rank of the first stage. Its numbers are there if it is also that of `WORKER`."""
    ENGINE = "engine core"
    """From vLLM's statistics of each step."""
    CONNECTOR = "KV connector"
    """Both sides of a KV connector, whose statistics vLLM collects itself."""
    FRONTEND = "API server"


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: what follows `PREFIX` and the part's name, without ``_total``.
        help: what is counted, a sentence.
        source: its key among the part's numbers; by default its name.
        label: the name of its label beside ``model_name`` and ``engine``, or names with ``, ``
            between them; empty if it has none.
        values: values of the label that are there from the start, at zero.
        buckets: upper bounds of a histogram's buckets.
    """

    name: str
    kind: Kind
    help: str
    source: str = ""
    origin: Origin = Origin.WORKER
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels beside ``model_name`` and ``engine``."""
        return tuple(self.label.split(", ")) if self.label else ()

    @property
    def key(self) -> str:
        return self.source or self.name

    def full_name(self, part: str) -> str:
        """The name in ``/metrics`` without a histogram's suffixes; ``part`` may be empty."""
        name = f"{PREFIX}{part}_{self.name}" if part else f"{PREFIX}{self.name}"
        return f"{name}_total" if self.kind is Kind.COUNTER else name


class Watch(Protocol):
    """Counts from the statistics that vLLM makes of each step, in the engine core."""

    def step(self, stats: Any) -> None:
        """Take in vLLM's ``SchedulerStats`` of a step."""

    def numbers(self) -> Numbers:
        """Return everything counted since the start."""


@dataclass(frozen=True)
class PartMetrics:
    """A part's metrics. `watch`: makes what counts in the engine core; None if nothing does.
    `tell`: is given the part's section and vLLM's stat loggers in the frontend, to mend what they
    say of the part; None if there is nothing to mend."""

    rows: Sequence[Metric]
    watch: Callable[[], Watch] | None = None
    tell: Callable[[Any, Sequence[Any]], None] | None = None


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


class Counters:
    """Named integers that several threads add to."""

    def __init__(self) -> None:
        self._values: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)

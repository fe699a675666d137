"""The list of all metrics, for ``vllm-graft metrics`` and the page on metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm_graft.base.metric import PREFIX, Kind, Metric, Origin
from vllm_graft.base.part import Part
from vllm_graft.base.text_table import Table
from vllm_graft.metrics.board import COMMON

_HEADS = ("metric", "kind", "labels", "meaning")


@dataclass(frozen=True)
class Listed:
    """A metric as it stands in ``/metrics``, its name without a histogram's suffixes."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    values: tuple[str, ...]
    origin: Origin
    help: str

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its samples."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))
        return (self.name,)


def catalogue(parts: Iterable[Part]) -> dict[str, list[Listed]]:
    """The metrics of each part by its name; those of no part under an empty name."""
    found = {part.name: [_listed(row, part.name) for row in part.metrics.rows] for part in parts}
    return {"": [_listed(row, "") for row in COMMON], **found}


def tables(metrics: dict[str, list[Listed]]) -> Iterator[Table]:
    """A table of metrics for each part."""
    for part, rows in metrics.items():
        title = f"`{PREFIX}{part}_*`" if part else "All parts"
        yield Table(title, _HEADS, [_cells(row) for row in rows])


def _listed(row: Metric, part: str) -> Listed:
    return Listed(row.full_name(part), row.kind, row.labels, row.values, row.origin, row.help)


def _cells(row: Listed) -> tuple[str, ...]:
    values = f" ({', '.join(row.values)})" if row.values else ""
    labels = ", ".join(f"`{label}`{values}" for label in row.labels)
    return f"`{row.name}`", row.kind.value, labels or "-", row.help

"""The list of all metrics, for ``vllm-graft metrics`` and the page on metrics."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from vllm_graft.base.metric import PREFIX, Metric
from vllm_graft.base.part import Part
from vllm_graft.base.text_table import Table
from vllm_graft.metrics.board import COMMON

_HEADS = ("metric", "kind", "labels", "meaning")


def catalogue(parts: Iterable[Part]) -> dict[str, list[Metric]]:
    """The metrics of each part by its name; those of no part under an empty name. Their names are
    those in ``/metrics``, a histogram's without its suffixes."""
    rows = {"": COMMON, **{part.name: part.metrics.rows for part in parts}}
    return {
        part: [replace(row, name=row.full_name(part)) for row in found]
        for part, found in rows.items()
    }


def tables(metrics: dict[str, list[Metric]]) -> Iterator[Table]:
    """A table of metrics for each part."""
    for part, rows in metrics.items():
        title = f"`{PREFIX}{part}_*`" if part else "All parts"
        yield Table(title, _HEADS, [_cells(row) for row in rows])


def _cells(row: Metric) -> tuple[str, ...]:
    values = f" ({', '.join(row.values)})" if row.values else ""
    labels = ", ".join(f"`{label}`{values}" for label in row.labels)
    return f"`{row.name}`", row.kind.value, labels or "-", row.help

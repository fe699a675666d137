"""The list of all metrics, for ``vllm-graft metrics`` and the page on metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm_graft.base.metric import PREFIX, Kind, Metric, Origin
from vllm_graft.base.part import Part
from vllm_graft.metrics.board import COMMON


@dataclass(frozen=True)
class Listed:
    """A metric as it stands in ``/metrics``.

    Attributes:
        name: its name, without the suffixes of a histogram's series.
        kind: what Prometheus makes of it.
        labels: its labels beside ``model_name`` and ``engine``.
        values: values of the label that are there from the start.
        origin: who counts.
        help: what is counted.
    """

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


def as_page(metrics: dict[str, list[Listed]]) -> str:
    """The metrics as tables in Markdown, a heading for each part."""
    blocks = []
    for part, rows in metrics.items():
        title = f"`{PREFIX}{part}_*`" if part else "All parts"
        head = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
        blocks.append("\n".join([f"### {title}", "", *head, *map(_line, rows)]))
    return "\n\n".join(blocks)


def _listed(row: Metric, part: str) -> Listed:
    return Listed(row.full_name(part), row.kind, row.labels, row.values, row.origin, row.help)


def _line(row: Listed) -> str:
    return f"| `{row.name}` | {row.kind.value} | {', '.join(_labels(row)) or '-'} | {row.help} |"


def _labels(row: Listed) -> Iterator[str]:
    for label in row.labels:
        yield f"`{label}`" + (f" ({', '.join(row.values)})" if row.values else "")

"""How a file of the ledger is written."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_graft.seams.ledger.entry import Kind, Seam

Row = tuple[str, Kind, str, str]
"""Path below the prefix, kind, what is expected, why."""


def seams(part: str, until: str, prefix: str, *rows: Row) -> Iterator[Seam]:
    """Rows of one part, below one prefix, which one change of vLLM's would make unnecessary."""
    for path, kind, expected, why in rows:
        yield Seam(part, f"{prefix}.{path}" if prefix else path, kind, expected, why, until)

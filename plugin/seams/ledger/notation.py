"""How a file of the ledger is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vllm_graft.seams.ledger.entry import Kind, Seam
from vllm_graft.seams.ledger.minor import minor_of

Row = tuple[str, Kind, str | Mapping[str, str], str]
"""Path below the prefix, kind, what is expected, why.

What is expected is one text, or one per minor version from which on it is so, the oldest first.
A symbol whose first minor version is newer than a vLLM is not asked of that vLLM.
"""


def seams(part: str, until: str, prefix: str, *rows: Row) -> Iterator[Seam]:
    """Rows of one part, below one prefix, which one change of vLLM's would make unnecessary."""
    for path, kind, expected, why in rows:
        forms = {"0.0": expected} if isinstance(expected, str) else expected
        (since, first), *later = ((minor_of(minor), form) for minor, form in forms.items())
        whole = f"{prefix}.{path}" if prefix else path
        yield Seam(part, whole, kind, first, why, until, tuple(later), since)

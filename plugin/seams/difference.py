"""How a symbol of another vLLM differs from what a row of the ledger expects of it."""

from __future__ import annotations

import difflib
import textwrap

from vllm_graft.seams.compare import SeamReport, provable
from vllm_graft.seams.sources import Sources

_LONGEST = 24
"""Lines that are shown of a difference."""


def difference(report: SeamReport, known: Sources | None, other: Sources) -> list[str]:
    """Lines of a unified diff, from what is known to what was found.

    There are none where nothing has moved, or nothing is left.

    Args:
        report: a row, compared with ``other``.
        known: a vLLM that the ledger fits: the texts of rows that look into one are compared.
        other: the vLLM that may differ.
    """
    if report.ok or report.is_missing:
        return []
    lines = _of_texts(report.seam.path, known, other) if provable(report) and known else []
    if not lines:
        gone, new = report.differing()
        lines = [*(f"- {piece}" for piece in gone), *(f"+ {piece}" for piece in new)]
    more = len(lines) - _LONGEST
    return [*lines[:_LONGEST], f"... {more} lines more"] if more > 0 else lines


def _of_texts(path: str, known: Sources, other: Sources) -> list[str]:
    try:
        old, new = (_lines(path, sources) for sources in (known, other))
    except LookupError:
        return []
    # The two lines of file names say nothing here.
    return list(difflib.unified_diff(old, new, n=1, lineterm=""))[2:]


def _lines(path: str, sources: Sources) -> list[str]:
    return textwrap.dedent(sources.segment(sources.find(path))).splitlines()

"""Versions of vLLM: whether one is supported, and how the installed one differs from the ledger."""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection, Sequence

from vllm_graft.base.errors import SeamError
from vllm_graft.base.values import reason_of
from vllm_graft.seams.compare import SeamReport, is_tested, vllm_version
from vllm_graft.seams.ledger.entry import minor_of
from vllm_graft.seams.reading import check_seams

OLDEST = "0.32"
"""The oldest minor version whose symbols we know."""


class Support(enum.Enum):
    """What can be said of a vLLM before anything runs on it."""

    TESTED = "tested"
    """Every symbol is as expected, and the tests of all parts passed with this minor version."""

    FITS = "seams fit, not tested"
    """Every symbol is as expected, but nothing was run with this minor version."""

    NOT = "not supported"
    """A symbol differs, or the version is older than all that we know."""


def support_of(version: str, reports: Sequence[SeamReport]) -> Support:
    """The support of a vLLM whose symbols were compared with the ledger."""
    if is_too_old(version) or any(report.problem for report in reports):
        return Support.NOT
    return Support.TESTED if is_tested(version) else Support.FITS


def is_too_old(version: str) -> bool:
    """Whether a version is older than all that we know; a SeamError if the text is none."""
    return minor_of(version) < minor_of(OLDEST)


@functools.cache
def differing(*parts: str) -> list[SeamReport] | str:
    """Symbols of the installed vLLM that are not as parts expect them; why they can't be told if
    so."""
    try:
        if is_too_old(version := vllm_version()):
            raise SeamError(f"vLLM {version} is older than {OLDEST}: install a newer one")
        return [report for report in check_seams(parts) if report.problem]
    except Exception as error:
        # What can't be told is not run. It must not stop an engine that would run without us.
        return f"vLLM can't be compared with the ledger: {reason_of(error)}"


def moved_text(version: str, parts: Collection[str], reports: Sequence[SeamReport]) -> str:
    """The first symbol that is not as some parts expect it, in a sentence; empty if all are."""
    if not reports:
        return ""
    return f"vLLM {version} is not what {', '.join(parts)} were written for: {reports[0].problem}."

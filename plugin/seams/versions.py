"""Versions of vLLM: whether one is supported, and how the installed one differs from the ledger."""

import enum
import functools
from collections.abc import Collection, Sequence
from pathlib import Path

from vllm_graft.base.errors import SeamError
from vllm_graft.base.values import reason_of
from vllm_graft.seams.compare import SeamReport, is_tested, ledger_at, read_seams
from vllm_graft.seams.ledger.entry import minor_of
from vllm_graft.seams.sources import Sources

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
    """Symbols of the installed vLLM that are not as parts expect them, from its source files; why
    they can't be told if so. Nothing is imported: the frontend needs few of these modules."""
    import vllm

    try:
        return differing_in(Path(str(vllm.__file__)).parents[1], str(vllm.__version__), parts)
    except Exception as error:
        # What can't be told is not run. It must not stop an engine that would run without us.
        return f"vLLM can't be compared with the ledger: {reason_of(error)}"


def differing_in(path: Path, version: str, parts: Collection[str]) -> list[SeamReport]:
    """Symbols of the vLLM at a path that are not as some parts expect them. Raises `GraftError` if
    there is no vLLM, and `SeamError` if it is too old."""
    if is_too_old(version):
        raise SeamError(f"vLLM {version} is older than {OLDEST}: install a newer one")
    asked = [seam for seam in ledger_at(version) if seam.part in parts]
    return [report for report in read_seams(asked, Sources(path)) if report.problem]


def moved_text(version: str, parts: Collection[str], reports: Sequence[SeamReport]) -> str:
    """The first symbol that is not as some parts expect it, in a sentence; empty if all are."""
    if not reports:
        return ""
    return f"vLLM {version} is not what {', '.join(parts)} were written for: {reports[0].problem}."

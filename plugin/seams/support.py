"""Whether a version of vLLM is supported: the newest two minor versions are."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from pathlib import Path

from vllm_graft.base.errors import GraftError, SeamError
from vllm_graft.seams.compare import SeamReport, is_tested, ledger_at
from vllm_graft.seams.sources import Sources
from vllm_graft.seams.static import read_seams
from vllm_graft.seams.versions import engine_for


class Support(enum.Enum):
    """What can be said of a vLLM before anything runs on it."""

    TESTED = "tested"
    """Every symbol is as expected, and the tests of all parts passed with this minor version."""

    FITS = "seams fit, not tested"
    """Every symbol is as expected, but nothing was run with this minor version."""

    NOT = "not supported"
    """A symbol differs, or the version is older than all that we know."""


def support_of(version: str, reports: Sequence[SeamReport]) -> Support:
    """What holds for a vLLM whose symbols were compared with the ledger."""
    try:
        engine_for(version)
    except SeamError:
        return Support.NOT
    if any(report.problem for report in reports):
        return Support.NOT
    return Support.TESTED if is_tested(version) else Support.FITS


@functools.cache
def moved(*parts: str) -> str:
    """Why parts can't run on the installed vLLM, from its source files; empty if they can.

    Nothing of vLLM is imported: the frontend has no use for most of these modules.
    """
    import vllm

    version = str(vllm.__version__)
    try:
        sources = Sources(Path(str(vllm.__file__)).parents[1])
        asked = [seam for seam in ledger_at(version) if seam.part in parts]
        reports = read_seams(asked, sources)
        support = support_of(version, reports)
    except GraftError as error:
        return str(error)
    if support is not Support.NOT:
        return ""
    problems = [report.problem for report in reports if report.problem]
    return f"vLLM {version} is not supported. {' '.join(problems[:1])}".strip()

"""Whether a version of vLLM is supported: the newest two minor versions are."""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection, Sequence
from pathlib import Path

from vllm_graft.base.errors import SeamError
from vllm_graft.base.values import reason_of
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
    """The support of a vLLM whose symbols were compared with the ledger."""
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

    try:
        return moved_in(Path(str(vllm.__file__)).parents[1], str(vllm.__version__), parts)
    except Exception as error:
        # What can't be told is not run. It must not stop an engine that would run without us.
        return f"vLLM can't be compared with the ledger: {reason_of(error)}"


def moved_in(path: Path, version: str, parts: Collection[str]) -> str:
    """The first symbol of the vLLM at a path that is not as some parts expect it; empty if none.

    Raises:
        GraftError: if there is no vLLM, or one that is too old.
    """
    engine_for(version)
    asked = [seam for seam in ledger_at(version) if seam.part in parts]
    problems = [report.problem for report in read_seams(asked, Sources(path)) if report.problem]
    if not problems:
        return ""
    return f"vLLM {version} is not what {', '.join(parts)} were written for: {problems[0]}."

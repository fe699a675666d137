"""Whether a version of vLLM is supported: the newest two minor versions are."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from vllm_graft.base.errors import SeamError
from vllm_graft.seams.compare import SeamReport, is_tested
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

"""Versions of vLLM: the engine module of each minor version, and whether one is supported.

A minor that is newer than all that we know takes the newest module: its seams have been compared
with the ledger before anything here is used. The newest two minor versions are supported.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from vllm_graft.base.errors import SeamError
from vllm_graft.base.values import reason_of
from vllm_graft.seams.compare import SeamReport, is_tested, vllm_version
from vllm_graft.seams.ledger.entry import minor_of
from vllm_graft.seams.reading import check_seams

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

    Serving = dict[tuple[int, int], list[BatchExecutionDescriptor]]
    """Graphs that may serve a batch, the preferred first, by its tokens and active LoRAs."""


class V032:
    """What vLLM 0.32 keeps private and we need, behind names of ours."""

    minor = "0.32"

    def planned(self, manager: CudaGraphManager) -> list[BatchExecutionDescriptor]:
        """FULL graphs that a manager is to capture."""
        from vllm.config import CUDAGraphMode

        return list(manager._capture_descs.get(CUDAGraphMode.FULL, []))

    def plan(self, manager: CudaGraphManager, sizes: Sequence[BatchExecutionDescriptor]) -> None:
        """Let a manager capture these FULL graphs and no others."""
        from vllm.config import CUDAGraphMode

        # Later ones fit into the memory that these took from the pool.
        largest_first = sorted(sizes, key=lambda size: size.num_tokens, reverse=True)
        if largest_first:
            manager._capture_descs[CUDAGraphMode.FULL] = largest_first
        else:
            # vLLM takes a mode that is listed for one that has graphs.
            manager._capture_descs.pop(CUDAGraphMode.FULL, None)

    def serving(self, manager: CudaGraphManager) -> Serving:
        """The manager's own table of the graphs that may serve a batch; changes to it count."""
        table: Serving = manager._candidates
        return table


Engine = V032
"""What an engine module offers; newer ones are subclasses that override what has changed."""

ENGINES: tuple[type[Engine], ...] = (V032,)
"""Oldest first."""


@functools.cache
def engine() -> Engine:
    """The module for the installed vLLM; errors as `engine_for`."""
    return engine_for(vllm_version())


def engine_for(version: str) -> Engine:
    """The module for a version: the newest that is not newer than it.

    Raises:
        SeamError: if there is none, or the text is no version.
    """
    asked = minor_of(version)
    fitting = [known for known in ENGINES if minor_of(known.minor) <= asked]
    if not fitting:
        known = ", ".join(each.minor for each in ENGINES)
        raise SeamError(
            f"vLLM {version} is older than what vllm-graft knows ({known}): install one"
        )
    return fitting[-1]()


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
def differing(*parts: str) -> list[SeamReport] | str:
    """Symbols of the installed vLLM that are not as parts expect them; why they can't be told if
    so."""
    try:
        engine()
        return [report for report in check_seams(parts) if report.problem]
    except Exception as error:
        # What can't be told is not run. It must not stop an engine that would run without us.
        return f"vLLM can't be compared with the ledger: {reason_of(error)}"


def moved_text(version: str, parts: Collection[str], reports: Sequence[SeamReport]) -> str:
    """The first symbol that is not as some parts expect it, in a sentence; empty if all are."""
    if not reports:
        return ""
    return f"vLLM {version} is not what {', '.join(parts)} were written for: {reports[0].problem}."

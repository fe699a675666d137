"""The ledger against a vLLM that is not installed, from its source files alone.

What `compare` finds out by importing, this reads from syntax trees, in the same notation. Members
that another package's base class may bring are said to be unknown, never to be right.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from vllm_graft.seams.compare import (
    SeamReport,
    assigned_in,
    in_order,
    normalized_hash,
    parameters_of,
)
from vllm_graft.seams.ledger.entry import Seam
from vllm_graft.seams.sources import Found, Sources, name_of

UNKNOWN = "unknown: "
"""What the found text begins with where the source files do not tell."""


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
        found = sources.find(seam.path)
    except LookupError as error:
        return f"nothing ({error})"
    if seam.kind == "name":
        return "present"
    if seam.kind in ("call", "def"):
        return _parameters(found, sources)
    if found.node is None:
        return "a module"
    if seam.kind == "class":
        return ", ".join(_base_names(found, sources))
    if seam.kind == "source":
        return normalized_hash(sources.segment(found))
    if seam.kind == "order":
        wanted = seam.expected.split(", ")
        return ", ".join(in_order(sources.segment(found), wanted))
    return _members(found, seam.expected.split(", "), sources)


def _base_names(found: Found, sources: Sources) -> Iterator[str]:
    if not isinstance(found.node, ast.ClassDef):
        yield "no class"
        return
    yield from (name_of(base) for base in found.node.bases)
    if not found.node.bases:
        yield "object"


def _parameters(found: Found, sources: Sources) -> str:
    node = found.node
    if isinstance(node, ast.ClassDef):
        try:
            init = sources._member(found, ["__init__"], 8)
        except LookupError:
            return ", ".join(_fields(found, sources)) or "no parameter"
        return _parameters(init, sources).removeprefix("self, ").replace("self", "no parameter")
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return f"{UNKNOWN}no function"
    return parameters_of(node)


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


def _members(found: Found, wanted: Sequence[str], sources: Sources) -> str:
    names: set[str] = set()
    foreign: list[str] = []
    _collect(found, sources, names, foreign, depth=12)
    missing = [name for name in wanted if name not in names]
    if missing and foreign:
        bases = ", ".join(sorted(set(foreign)))
        return f"{UNKNOWN}{', '.join(missing)} may be members of {bases}"
    return ", ".join(name for name in wanted if name in names)


_PLAIN_BASES = frozenset({"ABC", "Generic", "Protocol", "object", "Enum"})
"""Bases that bring no member that the ledger could mean."""


def _collect(
    found: Found, sources: Sources, names: set[str], foreign: list[str], depth: int
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
            foreign.append(base)

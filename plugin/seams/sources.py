"""The ledger against a vLLM that is not installed: a wheel, or a folder that one was unpacked to.

Nothing is imported, so that a vLLM for another Python, torch or platform can be read: syntax trees
tell, in the notation of `compare`. Members that another package's base class may bring are said to
be unknown, never to be right.
"""

from __future__ import annotations

import ast
import functools
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_graft.base.errors import ConfigError
from vllm_graft.seams.compare import UNKNOWN, SeamReport
from vllm_graft.seams.form import assigned_in, described, parameters_of
from vllm_graft.seams.ledger.entry import Seam

_PACKAGE = "vllm"
_DEPTH = 12
"""Imports that are followed to where a symbol is defined."""


@dataclass(frozen=True)
class Found:
    """A symbol where it is defined: a definition or an assignment; None for a module itself."""

    module: str
    """Below ``vllm``, dotted; empty for the package."""
    node: ast.stmt | None


class Sources:
    """Python files below ``vllm``, in a wheel or in a folder that holds it.

    Raises:
        ConfigError: if there is no vLLM in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files, self._read = _wheel(path) if path.is_file() else _folder(path)
        if f"{_PACKAGE}/__init__.py" not in self._files:
            raise ConfigError(
                f"{str(path)!r} holds no vLLM: name a wheel of vLLM, or a folder with "
                f"{_PACKAGE!r} in it"
            )

    @property
    def version(self) -> str:
        """The version in the wheel's name, or what ``vllm/_version.py`` says; empty if neither."""
        if self.path.suffix == ".whl":
            return self.path.name.split("-")[1]
        for node in self._tree("_version").body if self.file("_version") else ():
            value = getattr(node, "value", None)
            if isinstance(value, ast.Constant):
                targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
                names = {getattr(target, "id", "") for target in targets}
                if names & {"version", "__version__"}:
                    return str(value.value)
        return ""

    def file(self, module: str) -> str | None:
        """Name of a module's file; None if there is no such module."""
        stem = "/".join([_PACKAGE, *module.split(".")]) if module else _PACKAGE
        return next(
            (name for name in (f"{stem}.py", f"{stem}/__init__.py") if name in self._files), None
        )

    def text(self, module: str) -> str:
        """Source of a module.

        Raises:
            LookupError: if there is no such module.
        """
        name = self.file(module)
        if name is None:
            raise LookupError(f"No module named 'vllm.{module}'")
        return self._read(name)

    def find(self, path: str) -> Found:
        """The definition of ``vllm.<path>``: the longest module, then names in it.

        Re-exports, inherited members and star imports are followed within vLLM.

        Raises:
            LookupError: if it cannot be found.
        """
        return self._find(path, _DEPTH)

    def member(self, found: Found, name: str) -> Found:
        """A member of a class or module, where it is defined.

        Raises:
            LookupError: if it cannot be found.
        """
        if found.node is None:
            return self._in_module(found.module, [name], _DEPTH)
        return self._member(found, [name], _DEPTH)

    def segment(self, found: Found) -> str:
        """Source of a definition, with its decorators, as ``inspect.getsource`` gives it."""
        node = found.node
        assert node is not None, "a module is no definition"
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        lines = self.text(found.module).splitlines()
        return "\n".join(lines[first - 1 : node.end_lineno])

    def bases(self, found: Found) -> list[Found | str]:
        """Bases of a class: the definitions of those in vLLM, the names of the others."""
        assert isinstance(found.node, ast.ClassDef)
        bases: list[Found | str] = []
        for base in found.node.bases:
            name = name_of(base)
            try:
                bases.append(self._in_module(found.module, [name], _DEPTH))
            except LookupError:
                bases.append(name)
        return bases

    def _find(self, path: str, depth: int) -> Found:
        names = path.split(".")
        for count in range(len(names), -1, -1):
            module = ".".join(names[:count])
            if self.file(module) is not None:
                break
        if count == len(names):
            return Found(module, None)
        return self._in_module(module, names[count:], depth)

    def _in_module(self, module: str, names: list[str], depth: int) -> Found:
        if depth == 0:
            raise LookupError(f"imports of {module} lead nowhere")
        node = _defined(self._tree(module), names[0])
        if node is None:
            return self._re_exported(module, names, depth)
        return self._member(Found(module, node), names[1:], depth)

    def _member(self, found: Found, names: list[str], depth: int) -> Found:
        if not names:
            return found
        if not isinstance(found.node, ast.ClassDef):
            raise LookupError(f"{found.module} has no {names[0]}")
        for node in found.node.body:
            if _name_of_statement(node) == names[0]:
                return self._member(Found(found.module, node), names[1:], depth)
        for base in self.bases(found):
            if isinstance(base, Found):
                try:
                    return self._member(base, names, depth - 1)
                except LookupError:
                    continue
        raise LookupError(f"{found.node.name} has no {names[0]}")

    def _re_exported(self, module: str, names: list[str], depth: int) -> Found:
        stars = []
        for node in ast.walk(self._tree(module)):
            if not isinstance(node, ast.ImportFrom):
                continue
            source = self._source(module, node)
            if source is None:
                continue
            for alias in node.names:
                if (alias.asname or alias.name) == names[0]:
                    inner = f"{source}.{alias.name}" if source else alias.name
                    return self._find(".".join([inner, *names[1:]]), depth - 1)
                if alias.name == "*":
                    stars.append(source)
        for source in stars:
            try:
                return self._in_module(source, names, depth - 1)
            except LookupError:
                continue
        # Modules that make their attributes when they are asked for name them in a table.
        if target := _lazy_target(self._tree(module), names[0]):
            return self._find(".".join([*target, *names[1:]]), depth - 1)
        raise LookupError(f"vllm.{module} has no {names[0]}")

    def _source(self, module: str, node: ast.ImportFrom) -> str | None:
        """The module that an import takes names from, below ``vllm``; None outside of it."""
        if node.level == 0:
            package, _, rest = (node.module or "").partition(".")
            return rest if package == _PACKAGE else None
        name = self.file(module)
        assert name is not None
        above = module.split(".") if module else []
        if not name.endswith("/__init__.py"):
            above.pop()
        above = above[: len(above) - (node.level - 1)] if node.level > 1 else above
        return ".".join([*above, *([node.module] if node.module else [])])

    @functools.cached_property
    def _tree(self) -> Callable[[str], ast.Module]:
        """Parses a module once; the trees, a hundred megabytes of them, go with this object."""
        return functools.cache(lambda module: ast.parse(self.text(module)))


def name_of(expression: ast.expr) -> str:
    """The last name of ``a.b.C`` or ``C[T]``; the source of anything else."""
    if isinstance(expression, ast.Subscript):
        return name_of(expression.value)
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ast.unparse(expression)


def _wheel(path: Path) -> tuple[Collection[str], Callable[[str], str]]:
    """Names of the files of a wheel, and what reads one."""
    try:
        wheel = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as a wheel: {error}") from None
    return frozenset(filter(_is_source, wheel.namelist())), lambda name: wheel.read(name).decode()


def _folder(path: Path) -> tuple[Collection[str], Callable[[str], str]]:
    """Likewise of a folder."""
    files = (file for file in (path / _PACKAGE).rglob("*.py"))
    names = frozenset(file.relative_to(path).as_posix() for file in files)
    return names, lambda name: (path / name).read_text()


def _is_source(name: str) -> bool:
    return name.startswith(f"{_PACKAGE}/") and name.endswith(".py")


def _name_of_statement(node: ast.stmt) -> str:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return ""


def _defined(tree: ast.Module, name: str) -> ast.stmt | None:
    """A module's definition of a name, also one within ``if``, ``try`` or ``with``."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if _name_of_statement(node) == name:
            return node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            inner = [*node.body, *getattr(node, "orelse", ())]
            inner += (each for handler in getattr(node, "handlers", ()) for each in handler.body)
            waiting = inner + waiting
    return None


def _lazy_target(tree: ast.Module, name: str) -> list[str] | None:
    """Module and attribute of a name in a table like ``{"LLM": ".entrypoints.llm:LLM"}``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if (
                    isinstance(key, ast.Constant)
                    and key.value == name
                    and isinstance(value, ast.Constant)
                    and isinstance(value.value, str)
                    and ":" in value.value
                ):
                    module, _, attribute = value.value.lstrip(".").partition(":")
                    return [*module.split("."), attribute]
    return None


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
        return described(seam, _Read(sources.find(seam.path), sources))
    except LookupError as error:
        return f"nothing ({error})"


class _Read:
    """The form of a symbol in a file."""

    def __init__(self, found: Found, sources: Sources) -> None:
        self._found, self._sources = found, sources

    def bases(self) -> list[str]:
        node = self._found.node
        if not isinstance(node, ast.ClassDef):
            return []
        return [name_of(base) for base in node.bases] or ["object"]

    def parameters(self) -> list[str]:
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
        return self._sources.segment(self._found)

    def has(self, name: str) -> bool:
        if self._found.node is not None:
            return name in self._collected[0]
        try:
            return bool(self.member(name))
        except LookupError:
            return False

    def member(self, name: str) -> _Read:
        return _Read(self._sources.member(self._found, name), self._sources)

    def unknown(self, missing: Sequence[str]) -> str:
        foreign = ", ".join(sorted(self._collected[1]))
        return f"{UNKNOWN}{', '.join(missing)} may be members of {foreign}" if foreign else ""

    @functools.cached_property
    def _collected(self) -> tuple[set[str], set[str]]:
        names: set[str] = set()
        foreign: set[str] = set()
        _collect(self._found, self._sources, names, foreign, _DEPTH)
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

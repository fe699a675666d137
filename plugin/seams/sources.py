"""The ledger against a vLLM that is not installed: a wheel, or a folder that one was unpacked to.
Nothing is imported, so that a vLLM for another Python, torch or platform can be read: syntax trees
tell, in the notation of `compare`. Members that another package's base class may bring are said to
be unknown, never to be right."""

import ast
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_graft.base.errors import ConfigError

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
    """Python files below ``vllm``, in a wheel or in a folder that holds it. Raises `ConfigError` if
    there is no vLLM in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files, self._read = _wheel(path) if path.is_file() else _folder(path)
        self._trees: dict[str, ast.Module] = {}
        self._members: dict[Found, tuple[set[str], set[str]]] = {}
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
        """Source of a module. Raises `LookupError` if there is no such module."""
        name = self.file(module)
        if name is None:
            raise LookupError(f"No module named 'vllm.{module}'")
        return self._read(name)

    def find(self, path: str, depth: int = _DEPTH) -> Found:
        """The definition of ``vllm.<path>``: the longest module, then names in it. Re-exports,
        inherited members and star imports within vLLM count. Raises `LookupError`."""
        names = path.split(".")
        for count in range(len(names), -1, -1):
            module = ".".join(names[:count])
            if self.file(module) is not None:
                break
        if count == len(names):
            return Found(module, None)
        return self._in_module(module, names[count:], depth)

    def member(self, found: Found, name: str) -> Found:
        """A member of a class or module, where it is defined; a LookupError if it is missing."""
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
                defined = self._in_module(found.module, [name], _DEPTH)
            except LookupError:
                defined = found
            # A class may have the name of a base of another package.
            bases.append(name if defined == found else defined)
        return bases

    def fields(self, found: Found) -> Iterator[str]:
        """Fields of a dataclass or named tuple as parameters, those of its bases first."""
        assert isinstance(found.node, ast.ClassDef)
        for base in self.bases(found):
            if isinstance(base, Found) and isinstance(base.node, ast.ClassDef):
                yield from self.fields(base)
        for node in found.node.body:
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and name_of(node.annotation) != "ClassVar"
            ):
                yield f"{node.target.id}{'' if node.value is None else '='}"

    def members(self, found: Found) -> tuple[set[str], set[str]]:
        """Members of a class and of its bases, with what methods assign to ``self``; and the bases
        of other packages, which may bring more."""
        if not isinstance(found.node, ast.ClassDef):
            return set(), set()
        if found not in self._members:
            names, foreign = _own_members(found.node), set[str]()
            for base in self.bases(found):
                if isinstance(base, Found):
                    inherited = self.members(base)
                    names |= inherited[0]
                    foreign |= inherited[1]
                elif base not in _PLAIN_BASES:
                    foreign.add(base)
            self._members[found] = names, foreign
        return self._members[found]

    def _in_module(self, module: str, names: list[str], depth: int) -> Found:
        if depth == 0:
            raise LookupError(f"imports of {module} lead nowhere")
        for node in _statements(self._tree(module)):
            if _name_of_statement(node) == names[0]:
                return self._member(Found(module, node), names[1:], depth)
        return self._re_exported(module, names, depth)

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
        for node in _statements(self._tree(module)):
            if not isinstance(node, ast.ImportFrom):
                continue
            source = self._source(module, node)
            if source is None:
                continue
            for alias in node.names:
                if (alias.asname or alias.name) == names[0]:
                    inner = f"{source}.{alias.name}" if source else alias.name
                    return self.find(".".join([inner, *names[1:]]), depth - 1)
                if alias.name == "*":
                    stars.append(source)
        for source in stars:
            try:
                return self._in_module(source, names, depth - 1)
            except LookupError:
                continue
        # Modules that make their attributes when they are asked for name them in a table.
        if target := _lazy_target(self._tree(module), names[0]):
            return self.find(".".join([*target, *names[1:]]), depth - 1)
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

    def _tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            self._trees[module] = ast.parse(self.text(module))
        return self._trees[module]


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


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """A module's statements, also those within ``if``, ``try`` or ``with``."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            inner = [*node.body, *getattr(node, "orelse", ())]
            inner += (each for handler in getattr(node, "handlers", ()) for each in handler.body)
            waiting = inner + waiting


def _lazy_target(tree: ast.Module, name: str) -> list[str] | None:
    """Module and attribute of a name in a table like ``{"LLM": ".entrypoints.llm:LLM"}``."""
    for node in _statements(tree):
        match getattr(node, "value", None):
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values):
                    text = getattr(value, "value", None)
                    if getattr(key, "value", None) == name and isinstance(text, str):
                        module, colon, attribute = text.lstrip(".").partition(":")
                        if colon:
                            return [*module.split("."), attribute]
    return None


_PLAIN_BASES = frozenset({"ABC", "Generic", "Protocol", "object", "Enum"})
"""Bases that bring no member that the ledger could mean."""


def _own_members(cls: ast.ClassDef) -> set[str]:
    names = set()
    for node in ast.walk(cls):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Assign():
                names.update(each.id for each in node.targets if isinstance(each, ast.Name))
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names

"""A symbol's form in vLLM's source files, in the notation of the ledger."""

import ast
import hashlib
import textwrap
from collections.abc import Iterator, Sequence

from vllm_graft.seams.ledger.entry import Seam, head_of, items
from vllm_graft.seams.sources import Found, Sources, name_of

UNKNOWN = "unknown: "
"""What the found text begins with where source files do not tell."""

NO_OTHER = "no other"
"""The last of a function's parameters, where ours stands in its place and would not know others."""


class Symbol:
    """A symbol that is there. `member` raises `LookupError`, as does finding one."""

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
                return list(self._sources.fields(self._found))
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return [f"{UNKNOWN}no function"]
        return parameters_of(node)

    def source(self) -> str:
        """Text of a class or function, with its decorators."""
        return self._sources.segment(self._found)

    def has(self, name: str) -> bool:
        """Whether a class or module has a member, which methods may assign to ``self``, too."""
        if self._found.node is not None:
            return name in self._sources.members(self._found)[0]
        try:
            return bool(self.member(name))
        except LookupError:
            return False

    def member(self, name: str) -> "Symbol":
        """A member, for its parameters."""
        return Symbol(self._sources.member(self._found, name), self._sources)

    def unknown(self, missing: Sequence[str]) -> str:
        """Why it can't be told whether these members are there; empty where they are not."""
        foreign = ", ".join(sorted(self._sources.members(self._found)[1]))
        return f"{UNKNOWN}{', '.join(missing)} may be members of {foreign}" if foreign else ""


def described(seam: Seam, form: Symbol) -> str:
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


def _head(form: Symbol, wanted: list[str]) -> str:
    return ", ".join(form.bases() or fitting(form.parameters(), wanted))


def _name(item: str) -> str:
    return item.partition("(")[0]


def _member(form: Symbol, item: str) -> str:
    name, bracket, parameters = item.partition("(")
    if not bracket:
        return name
    found = fitting(form.member(name).parameters(), items(parameters.removesuffix(")")))
    return f"{name}({', '.join(found)})"


def fitting(found: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Parameters that count for a caller who passes those ``wanted``; equal to them if they fit.
    Optional ones that nobody passes do not count, nor does whether one that is passed may be left
    out. Optional ones are passed by name, in any order."""
    if wanted[-1:] == [NO_OTHER]:
        return [*found, NO_OTHER]
    kept = []
    for parameter in found:
        required = parameter.removesuffix("=")
        if parameter in wanted or (not parameter.endswith("=") and not parameter.startswith("*")):
            kept.append(parameter)
        elif required in wanted:
            kept.append(required)
    if sorted(kept) == sorted(wanted) and _required(kept) == _required(wanted):
        return list(wanted)
    return kept


def _required(parameters: Sequence[str]) -> list[str]:
    return [parameter for parameter in parameters if not parameter.endswith("=")]


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """A function's parameters."""
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
    return shown


def normalized_hash(source: str) -> str:
    """Twelve hex digits over what a source does."""
    return hashlib.sha256(normalized(source).encode()).hexdigest()[:12]


def normalized(source: str) -> str:
    """A source without comments, docstrings, types and texts that are put together for people.
    Nothing of these changes what code does for its callers."""
    return ast.unparse(ast.fix_missing_locations(_Bare().visit(ast.parse(textwrap.dedent(source)))))


class _Bare(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.visit_ClassDef(node)

    def visit_ClassDef(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    ) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return node if node.value is None else ast.Assign([node.target], node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        # Python's versions also write these in their own ways.
        return ast.Constant("...")


def in_order(source: str, wanted: list[str]) -> Iterator[str]:
    """Yield the ``wanted`` texts that ``source`` holds in this order, up to the first missing."""
    start = 0
    for text in wanted:
        start = source.find(text, start)
        if start < 0:
            return
        yield text
        start += len(text)

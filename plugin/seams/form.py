"""The forms of functions and texts, in the notation of the ledger."""

from __future__ import annotations

import ast
import hashlib
import textwrap
from collections.abc import Iterator, Sequence

NO_OTHER = "no other"
"""The last of a function's parameters, where ours stands in its place and would not know others."""


def fitting(found: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Parameters that count for a caller who passes those ``wanted``; equal to them if they fit.

    Optional ones that nobody passes do not count, nor does whether one that is passed may be left
    out. Optional ones are passed by name, in any order.
    """
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

    Nothing of these changes what code does for its callers.
    """
    return ast.unparse(ast.fix_missing_locations(_Bare().visit(ast.parse(textwrap.dedent(source)))))


class _Bare(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self._without_docstring(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self._without_docstring(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._without_docstring(node)

    def _without_docstring(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    ) -> ast.AST:
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return node if node.value is None else ast.Assign([node.target], node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        # Python's versions also write these in their own ways.
        return ast.Constant("...")


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

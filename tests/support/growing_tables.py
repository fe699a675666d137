"""Finds what may grow while an engine serves: caches of functions, and tables of objects."""

import ast
from collections.abc import Iterator
from pathlib import Path

TABLES = ("dict", "set", "OrderedDict", "defaultdict", "Counter", "WeakKeyDictionary")
CACHES = ("cache", "lru_cache")


def growing(source: str) -> set[str]:
    """The caches and tables of a module: ``function`` or ``Class.attribute``, ``.name`` for one of
    the module itself. Tables are mappings and sets that are made empty, and local ones are none."""
    return set(_found(ast.parse(source), (), is_local=False))


def growing_in(root: Path, folders: tuple[str, ...], left_out: tuple[str, ...]) -> set[str]:
    """Return those of all modules below some folders, each behind its path and a colon."""
    paths = [each for folder in folders for each in (root / folder).rglob("*.py")]
    names = {path.relative_to(root).as_posix(): path for path in paths}
    return {
        f"{name}:{each}"
        for name, path in names.items()
        if not name.startswith(left_out)
        for each in growing(path.read_text())
    }


def _found(node: ast.AST, scope: tuple[str, ...], *, is_local: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _found(child, (*scope, child.name), is_local=False)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(_name(each) in CACHES for each in child.decorator_list):
                yield ".".join((*scope, child.name))
            yield from _found(child, scope, is_local=True)
        else:
            if isinstance(child, ast.Assign | ast.AnnAssign):
                yield from _assigned(child, scope, is_local=is_local)
            elif isinstance(child, ast.Call) and _made_cache(child):
                yield ".".join((*scope, "cache()"))
            yield from _found(child, scope, is_local=is_local)


def _assigned(
    node: ast.Assign | ast.AnnAssign, scope: tuple[str, ...], *, is_local: bool
) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        pairs = [(target, node.value)]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(target.elts, node.value.elts, strict=True))
        for place, value in pairs:
            if value is not None and _is_empty_table(value):
                if isinstance(place, ast.Attribute):
                    yield f"{'.'.join(scope)}.{place.attr}"
                elif isinstance(place, ast.Name) and not is_local:
                    yield f"{'.'.join(scope)}.{place.id}"


def _is_empty_table(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        if _name(value.func) == "field":
            made = [each.value for each in value.keywords if each.arg == "default_factory"]
            return any(_name(each) in TABLES for each in made)
        given = value.args if _name(value.func) != "defaultdict" else ()
        return _name(value.func) in TABLES and not given and not value.keywords
    return isinstance(value, ast.Dict) and not value.keys


def _made_cache(call: ast.Call) -> bool:
    """``functools.cache(function)``, and not a method of some object's that is called so."""
    function = call.func
    of_module = isinstance(function, ast.Attribute) and _name(function.value) == "functools"
    return of_module and _name(function) in CACHES and bool(call.args)


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")

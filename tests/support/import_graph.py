"""The import graph of our modules, and that of their folders.

``python tests/support/import_graph.py`` prints each folder with the folders that it imports, the
lowest floor first, and every circle. Imports within functions and for type checkers count as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "vllm_graft"
PARTS = ("graph_runners", "hicache", "spec_decode")
"""Folders beside the root package's, which is ``plugin``."""

Graph = dict[str, set[str]]


def source_files(root: Path = ROOT) -> dict[str, Path]:
    """Find every product module by its dotted name."""
    found = {}
    for top in ("plugin", *PARTS):
        for file in sorted((root / top).rglob("*.py")):
            below = file.relative_to(root / top).with_suffix("").parts
            names = [PACKAGE, *([] if top == "plugin" else [top]), *below]
            found[".".join(names[:-1] if names[-1] == "__init__" else names)] = file
    return found


def imports_of(text: str, known: Iterable[str]) -> set[str]:
    """Return the modules among ``known`` that a module's text imports, wherever it does so."""
    known, found = set(known), set()
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            # "from package import module" names a module, "from module import name" does not.
            found.add(name if name in known else name.rpartition(".")[0])
    return found & known


def module_graph(files: Mapping[str, Path]) -> Graph:
    """Return the modules that each module imports."""
    return {name: imports_of(file.read_text(), files) - {name} for name, file in files.items()}


def folder_of(module: str, files: Mapping[str, Path]) -> str:
    """Return the package that a module lies in; a package's ``__init__`` lies in itself."""
    return module if files[module].name == "__init__.py" else module.rpartition(".")[0]


def folder_graph(modules: Graph, files: Mapping[str, Path]) -> Graph:
    """Return the other folders that each folder imports."""
    folders: Graph = {folder_of(module, files): set() for module in modules}
    for module, imported in modules.items():
        home = folder_of(module, files)
        folders[home] |= {folder_of(each, files) for each in imported} - {home}
    return folders


def circles(graph: Graph) -> list[list[str]]:
    """Find sets of two or more nodes that reach each other, each sorted (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], index[other])
        if lowest[node] == index[node]:
            place = stack.index(node)
            circle = stack[place:]
            del stack[place:]
            if len(circle) > 1:
                found.append(sorted(circle))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def heights(graph: Graph) -> dict[str, int]:
    """Compute the floor of each node of a graph without circles: 0 imports nothing of ours."""
    known: dict[str, int] = {}

    def height(node: str) -> int:
        if node not in known:
            known[node] = 1 + max((height(other) for other in graph[node]), default=-1)
        return known[node]

    for node in graph:
        height(node)
    return known


def main() -> int:
    """Print the graph of folders; the exit status is 1 if there is a circle."""
    files = source_files()
    graph = folder_graph(module_graph(files), files)
    found = circles(graph)
    for circle in found:
        print("CIRCLE:", " <-> ".join(circle))
    floors = {} if found else heights(graph)  # A circle has no height.
    for folder in sorted(graph, key=lambda name: (floors.get(name, 0), name)):
        below = ", ".join(sorted(each.removeprefix(f"{PACKAGE}.") for each in graph[folder]))
        height = floors.get(folder, "?")
        print(f"{height:>2} {folder.removeprefix(f'{PACKAGE}.'):<36} -> {below or '-'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

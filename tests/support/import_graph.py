"""The import graph of our modules, and that of their folders.

``python tests/support/import_graph.py`` prints each folder with the folders that it imports, the
lowest floor first, and every circle. Imports within functions and for type checkers count as well.
``--svg`` prints a picture of the rooms in place of that, and ``--svg spec_decode`` one of the rooms
of a part: the lowest floor at the bottom, without arrows that follow from others.
"""

import ast
import sys
from collections.abc import Iterable, Mapping, Sequence
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
    return {name: imports_of(file.read_text(), files) - {name} for name, file in files.items()}


def folder_of(module: str, files: Mapping[str, Path]) -> str:
    """Return the package that a module lies in; a package's ``__init__`` lies in itself."""
    return module if files[module].name == "__init__.py" else module.rpartition(".")[0]


def folder_graph(modules: Graph, files: Mapping[str, Path]) -> Graph:
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


def room_of(folder: str, part: str) -> str:
    """Return the room that a folder is in: a part, or a folder of ``plugin`` or of a named part.

    The files of ``plugin`` or of the part itself are a room, too. Folders elsewhere have none.
    """
    inside = f"{PACKAGE}.{part}" if part else PACKAGE
    if folder == inside:
        return part or "front door"
    return folder.removeprefix(f"{inside}.").split(".")[0] if folder.startswith(inside) else ""


def room_graph(folders: Graph, part: str = "") -> Graph:
    rooms: Graph = {}
    for folder, imported in folders.items():
        if home := room_of(folder, part):
            found = {room_of(each, part) for each in imported} - {home, ""}
            rooms.setdefault(home, set()).update(found)
    return rooms


def without_shortcuts(graph: Graph) -> Graph:
    """Leave out arrows to what another arrow of the same node leads to (no circles)."""
    reached: Graph = {}
    for node in sorted(graph, key=heights(graph).__getitem__):
        reached[node] = graph[node].union(*(reached[other] for other in graph[node]))
    return {
        node: {other for other in below if not any(other in reached[each] for each in below)}
        for node, below in graph.items()
    }


def picture(graph: Graph) -> str:
    """Draw a graph without circles as SVG: a row per floor, arrows down to what is imported."""
    floors = heights(graph)
    numbers = range(max(floors.values()) + 1)
    rows = [sorted(name for name in graph if floors[name] == each) for each in numbers]
    width, height = 760, 58 * len(rows) + 12
    spots = {
        name: (width * (place + 1) / (len(row) + 1) + (-1) ** floor * 36, height - 34 - 58 * floor)
        for floor, row in enumerate(rows)
        for place, name in enumerate(row)
    }
    lines, boxes = [], []
    for name, (x, y) in spots.items():
        half = 3.4 * len(name) + 10
        frame = f'x="{x - half:.0f}" y="{y - 14:g}" width="{2 * half:.0f}" height="26"'
        boxes.append(f'<rect {frame} rx="4" fill="#eef1fb" stroke="#9aa5b1"/>')
        boxes.append(f'<text x="{x:.0f}" y="{y + 3:g}" text-anchor="middle">{name}</text>')
        for other in sorted(without_shortcuts(graph)[name]):
            x1, y1 = spots[other]
            ends = f'x1="{x:.0f}" y1="{y + 12:g}" x2="{x1:.0f}" y2="{y1 - 16:g}"'
            lines.append(f'<line {ends} stroke="#66708a" marker-end="url(#tip)"/>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="11">',
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0L8 4L0 8z" fill="#66708a"/></marker>',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *lines,
            *boxes,
            "</svg>",
        ]
    )


def main(arguments: Sequence[str] = ()) -> int:
    """Print the graph of folders, or a picture; the exit status is 1 if there is a circle."""
    files = source_files()
    graph = folder_graph(module_graph(files), files)
    if list(arguments[:1]) == ["--svg"]:
        print(picture(room_graph(graph, "".join(arguments[1:2]))))
        return 0
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
    sys.exit(main(sys.argv[1:]))

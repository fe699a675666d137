"""Imports go down the four floors (testing and measuring are above), and folders form no circle."""

from __future__ import annotations

import ast
import functools
import json
from pathlib import Path

import pytest

from tests.support.import_graph import (
    PACKAGE,
    Graph,
    circles,
    folder_graph,
    heights,
    imports_of,
    module_graph,
    source_files,
)
from tests.support.room_lines import allowed, problems, room_lines

FLOORS = (
    ("base",),
    ("seams", "hooks"),
    ("graph_runners", "hicache", "spec_decode"),
    ("front door",),
    ("testing",),
    ("bench", "proof", "train"),
)
"""The floors, lowest first. Rooms of one floor don't import each other (see `NEIGHBOURS`)."""

NEIGHBOURS = {("spec_decode", "graph_runners.language")}
"""Trees are drafted and verified in graphs of the language model."""

FILES = source_files()


@functools.cache
def module_imports() -> Graph:
    """Read all modules, once and in the process that tests them."""
    return module_graph(FILES)


def room_of(module: str) -> str:
    """Return a module's folder below the package; "front door" for the package's own modules."""
    below = module.removeprefix(PACKAGE).removeprefix(".").split(".")
    known = {room for floor in FLOORS for room in floor}
    return below[0] if below[0] in known else "front door"


def floor_of(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def upward(modules: Graph) -> list[str]:
    """Return imports that the floors forbid."""
    found = []
    for module, imported in sorted(modules.items()):
        for other in sorted(imported):
            ours, theirs = room_of(module), room_of(other)
            below = other.removeprefix(f"{PACKAGE}.")
            allowed = any(ours == a and below.startswith(f"{b}.") for a, b in NEIGHBOURS)
            if ours != theirs and floor_of(theirs) >= floor_of(ours) and not allowed:
                found.append(f"{module} imports {other}")
    return found


def test_every_import_goes_down() -> None:
    assert upward(module_imports()) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("base.log", "from vllm_graft.seams.compare import vllm_version"),
        ("seams.wrap", "from vllm_graft.spec_decode.drafters import target_dependent"),
        ("hooks.manager", "from vllm_graft.config import GraftConfig"),
        ("hicache.connector", "import vllm_graft.spec_decode.tree_part"),
        ("graph_runners.language.mixed", "from vllm_graft.spec_decode.trees.tree import TreeShape"),
        ("spec_decode.tree_part", "from vllm_graft.graph_runners.vision.runner import VitStats"),
        ("activation", "from vllm_graft.testing import cpu_engine"),
        ("testing.engine", "from vllm_graft.bench.common import report"),
    ],
)
def test_a_planted_import_is_found(module: str, line: str) -> None:
    """This negative control plants an import in each place where one may hide."""
    module = f"{PACKAGE}.{module}"
    for form in ("{}", "def late():\n    {}", "if TYPE_CHECKING:\n    {}"):
        planted = imports_of(form.format(line), FILES)
        [found] = upward({**module_imports(), module: module_imports()[module] | planted})
        assert found.startswith(f"{module} imports ")


def test_folders_form_no_circle() -> None:
    graph = folder_graph(module_imports(), FILES)
    assert circles(graph) == []
    # Each folder has a height, and imports only from lower ones.
    height = heights(graph)
    assert all(height[other] < height[folder] for folder in graph for other in graph[folder])


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_no_folder_is_a_heap() -> None:
    """A folder has at most 16 files, ``__init__`` included."""
    count: dict[str, int] = {}
    for file in FILES.values():
        count[str(file.parent)] = count.get(str(file.parent), 0) + 1
    assert {folder: number for folder, number in count.items() if number > 16} == {}


ROLES = {"__init__", "__main__"}
"""File names that several folders may have, because they name the file's role in its folder."""

SIBLINGS = {"base", "command", "store"}
"""File names of one role in sibling folders."""


def test_a_search_by_name_finds_one_file() -> None:
    places: dict[str, list[str]] = {}
    for module, file in FILES.items():
        places.setdefault(file.stem, []).append(module)
    twice = {
        name: sorted(modules)
        for name, modules in places.items()
        if len(modules) > 1 and name not in ROLES | SIBLINGS
    }
    assert twice == {}


FOLDERS = frozenset({"plugin", "graph_runners", "spec_decode", "hicache", "tests", "benchmarks"})
"""Folders that are siblings in a checkout; in an installed package they are below vllm_graft."""


def by_folder_name(source: str) -> list[str]:
    """Return imports that name a folder of the checkout, which work in no other working folder."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append(node.module)
    return [name for name in found if name.partition(".")[0] in FOLDERS]


def test_nothing_of_the_product_is_imported_by_its_folder_s_name() -> None:
    assert len(FILES) > 300
    assert {name: by_folder_name(file.read_text()) for name, file in FILES.items()} == {
        name: [] for name in FILES
    }
    assert by_folder_name("def late():\n    from hicache.host import pool") == ["hicache.host"]
    assert by_folder_name("import tests.support") == ["tests.support"]
    assert by_folder_name("from . import tests\nimport vllm_graft.hicache") == []


ROOM_LINES = json.loads(Path(__file__).with_name("room_lines.json").read_text())
"""How many lines of Python a room may have; `tests/support/room_lines.py` writes the table."""


def test_a_room_grows_only_with_its_number() -> None:
    found = room_lines()
    assert len(found) > 20
    assert sum(found.values()) > 100_000
    assert problems(found, ROOM_LINES) == []


def test_numbers_that_do_not_fit_are_named() -> None:
    table = {"hicache/host": 1000, "tests": 50_000, "gone": 7}
    said = problems({"hicache/host": 1001, "tests": 47_000, "plugin/new": 1}, table)
    assert [each.partition(":")[0] for each in said] == [
        "gone has only 0 lines, its number is 7",
        "hicache/host has 1001 lines, its number is 1000",
        "plugin/new has 1 lines, its number is 0",
        "tests has only 47000 lines, its number is 50000",
    ]
    assert all("tests/room_lines.json" in each for each in said)
    assert problems({"a": 96, "b": 100}, {"a": 100, "b": 100}) == []
    assert [allowed(lines) for lines in (3, 191, 1001)] == [3, 200, 1010]

"""The pages of `docs` say what is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vllm_graft import __version__, testing
from vllm_graft.config import GraftConfig
from vllm_graft.graph_runners.vision.vision_config import VitConfig
from vllm_graft.seams.compare import TESTED_VLLM
from vllm_graft.spec_decode.config.draft_config import DraftConfig
from vllm_graft.spec_decode.config.tree_config import TreeConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PARTS = ("plugin", "spec_decode", "graph_runners", "hicache")
WARNINGS = {"warning_once", "warning", "error", "exception"}


def cells(page: str, columns: int) -> list[list[str]]:
    """Return the rows of a page's tables of so many columns, heads included."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [row for row in rows if len(row) == columns]


def bounds(part: type[Any], name: str) -> tuple[Any, Any]:
    metadata = part.model_fields[name].metadata
    low = [rule.ge for rule in metadata if hasattr(rule, "ge")]
    high = [rule.le for rule in metadata if hasattr(rule, "le")]
    return (low or [None])[0], (high or [None])[0]


def test_every_key_is_described() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    headings = re.findall(r"^## `graft\.(\w+)`$", page, re.MULTILINE)
    assert headings == list(GraftConfig.model_fields)
    sections = re.split(r"^## `graft.*$", page, flags=re.MULTILINE)[1:]
    for part, section in zip((TreeConfig, VitConfig, DraftConfig), sections, strict=False):
        head, *rows = cells(section, 4)
        assert head == ["key", "default", "allowed", "meaning"]
        assert [row[0].strip("`") for row in rows] == list(part.model_fields)
        defaults = part()
        for name, default, allowed, _ in rows:
            key = name.strip("`")
            value = getattr(defaults, key)
            assert default == ("none" if value is None else f"`{str(value).lower()}`")
            low, high = bounds(part, key)
            if low is not None:
                assert allowed == f"{low} to {high}"


YIELDING = ("checks", "refusals")
"""Names of files that yield lines of a message end with these words."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)


def anchor(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        file, _, fragment = target.partition("#")
        led_to = page.parent / file if file else page
        assert led_to.exists(), target
        assert not fragment or fragment in map(anchor, headings(led_to)), target


# A record names files of the commit that it was made at.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "records" not in page.parts], ids=name_of
)
def test_files_that_are_named_exist(page: Path) -> None:
    folders = "|".join([*PARTS, "benchmarks", "docs", "tests"])
    named = re.findall(rf"`((?:{folders})/[\w/.]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_pages_that_the_code_names_exist_and_have_the_heading() -> None:
    named = []
    for folder in (*PARTS, "benchmarks", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            # A comment may name a page on one line and its heading on the next.
            text = re.sub(r"\s*\n\s*(?:# )?", " ", file.read_text())
            named += re.findall(r"\b(docs/[\w/-]+\.md)(?:,? \(?\"([^\"]+)\")?", text)
    assert len(named) > 5
    for page, heading in named:
        assert (ROOT / page).exists(), page
        assert any(heading in found for found in headings(ROOT / page)), (page, heading)


def test_every_room_is_in_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = [row[0].strip("`") for row in cells(page.partition("| room |")[2], 2)]
    files = [file for part in PARTS for file in (ROOT / part).rglob("*.py")]
    rooms = {name_of(file.parent) for file in files if file.name != "__init__.py"}
    assert sorted(listed) == sorted(rooms)


@cache
def source_trees() -> dict[Path, ast.Module]:
    """Parse the product's modules, without the harness and the benchmarks."""
    files = [file for part in PARTS for file in (ROOT / part).rglob("*.py")]
    apart = {ROOT / "plugin" / "testing", ROOT / "plugin" / "bench"}
    return {file: ast.parse(file.read_text()) for file in files if not apart & {*file.parents}}


def texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts below a node, with ``{}`` for values that are filled in."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.value
    elif isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        yield "".join(map(str, parts))
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


@cache
def errors() -> set[str]:
    """Names of our errors, of functions that make one, and of what ends a command."""
    nodes = [node for tree in source_trees().values() for node in ast.walk(tree)]
    found, before = {"GraftError"}, 0
    while len(found) > before:
        before = len(found)
        for node in nodes:
            if isinstance(node, ast.ClassDef) and found & {
                ast.unparse(base) for base in node.bases
            }:
                found.add(node.name)
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                found |= {node.name} if ast.unparse(node.returns) in found else set()
    return found | {"exit"}


def test_our_errors_are_known() -> None:
    assert errors() >= {"ConfigError", "EntryError", "NotActiveError", "_not_without", "_unusable"}
    assert "ValueError" not in errors()


def messages() -> Iterator[tuple[str, str]]:
    """Yield the texts of errors, warnings, and lines that a check yields, each with its place."""
    for file, tree in source_trees().items():
        for node in ast.walk(tree):
            found: list[ast.expr] = []
            if isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                found = node.args if called in errors() else node.args[: called in WARNINGS]
            elif isinstance(node, ast.Yield) and node.value and file.stem.endswith(YIELDING):
                found = [node.value] if not isinstance(node.value, ast.Call) else []
            text = " ".join(text for arg in found for text in texts(arg))
            if len(re.sub(r"\W|{}", "", text)) > 1:
                yield f"{file.relative_to(ROOT)}:{node.lineno}", text


def quoted_messages() -> list[str]:
    """Return the parts of messages that the page on troubleshooting quotes, in first cells."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| the message contains \|.*\n(?:\|.*\n)*", page, re.MULTILINE)
    return [quoted for table in tables for quoted in re.findall(r"^\| `(.+?)` \|", table, re.M)]


def unquoted(quoted: list[str]) -> list[str]:
    """Messages that contain none of some fragments, each with its place."""
    return [
        f"{place}: {text}"
        for place, text in messages()
        if not any(fragment in text for fragment in quoted)
    ]


def test_every_message_is_on_the_page_on_troubleshooting() -> None:
    assert unquoted(quoted_messages()) == []
    assert len([*messages()]) > 200


def test_a_message_that_the_page_lacks_is_noticed() -> None:
    quoted = [each for each in quoted_messages() if each != "is refused:"]
    assert any("is refused:" in each for each in unquoted(quoted))


def test_the_page_on_troubleshooting_quotes_what_the_code_says() -> None:
    said = [text for tree in source_trees().values() for text in texts(tree)]
    quoted = quoted_messages()
    assert len(quoted) > 100
    assert len(set(quoted)) == len(quoted)
    assert [each for each in quoted if not any(each in text for text in said)] == []


def test_the_harness_page_lists_what_is_exported() -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    _, *rows = cells(page, 2)
    named = {name for row in rows for name in re.findall(r"`(\w+)(?:\(.*?\))?`", row[0])}
    assert named == set(testing.__all__)


def test_versions() -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"`vllm-graft {__version__}: " in readme
    assert f"vLLM {' or '.join(TESTED_VLLM)} " in readme
    citation = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {__version__}" in citation
    page = (ROOT / "docs" / "versions.md").read_text()
    assert f"**{' and '.join(TESTED_VLLM)}**" in page
    assert f"## {__version__} " in (ROOT / "CHANGELOG.md").read_text()

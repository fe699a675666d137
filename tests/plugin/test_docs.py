"""The pages of `docs` say what is there."""

from __future__ import annotations

import re
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
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def cells(page: str, columns: int) -> list[list[str]]:
    """Rows of a page's tables of so many columns, heads included."""
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
    sections = re.split(r"^## .*$", page, flags=re.MULTILINE)[1:]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:plugin|spec_decode|graph_runners|tests|docs)/[\w/.]+)`", page.read_text()
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_module_of_a_part_is_in_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = set()
    for row in cells(page, 2):
        folder = ""
        for name in re.findall(r"`([\w/.]+)`", row[0]):
            folder = name.rpartition("/")[0] or folder
            listed.add(f"{folder}/{name.rpartition('/')[2]}")
    for folder in ("spec_decode", "graph_runners"):
        files = {f"{folder}/{file.name}" for file in (ROOT / folder).glob("[!_]*.py")}
        assert files - listed == set()


def test_the_harness_page_lists_what_is_exported() -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    _, *rows = cells(page, 2)
    named = {name for row in rows for name in re.findall(r"`(\w+)(?:\(.*?\))?`", row[0])}
    assert named == set(testing.__all__)


def test_versions() -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"`vllm-graft {__version__}: " in readme
    assert f"vLLM {TESTED_VLLM} " in readme
    assert f"## {__version__} " in (ROOT / "CHANGELOG.md").read_text()

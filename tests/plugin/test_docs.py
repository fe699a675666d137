"""The pages of `docs` say what is there."""

import re
import runpy
from pathlib import Path

import pytest

from vllm_graft import __version__, testing
from vllm_graft.seams.compare import TESTED_VLLM

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PARTS = ("plugin", "spec_decode", "graph_runners", "hicache")


def cells(page: str, columns: int) -> list[list[str]]:
    """Return the rows of a page's tables of so many columns, heads included."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [row for row in rows if len(row) == columns]


def test_pages_hold_what_the_code_says() -> None:
    """Keys, metrics, models and the support matrix."""
    written = runpy.run_path(str(ROOT / ".ci" / "pages.py"))["pages"]()
    assert [str(page) for page, text in written.items() if page.read_text() != text] == []
    text = "".join(written.values())
    assert text.count("\n| `") > 40
    for key, says in (
        ("### `graft.tree.draft_window`", "Default none; 1 to 1048576. Tokens before a tree"),
        ("### `graft.draft.extend`", "Default `true`; `true`, `false`. Whether the first pass"),
        ("#### `graft.tree.ngram.reference`", "Default `2048`; 0 to 1048576. Tokens of a second"),
        ("#### `host_bytes`", "Required; a size. Bytes of host memory"),
        ("#### `staging_bytes`", "Default `48MiB`; a size. Bytes of device memory"),
        ("#### `prefetch.max_share`", "Default `0.5`; over 0 to 1. Fraction of the host pool"),
        ("### `graft.tree.policy`", "Default `dynamic`; a name. Name of a `graft_tree_policies`"),
    ):
        assert f"\n{key}\n\n{says}" in text
    models = cells(written[ROOT / "docs" / "models.md"], 6)
    told = {row[0]: (row[3], row[5]) for row in models}
    assert len(told) > 30
    assert told["Qwen3-VL-8B-Instruct"][1] == "exact, speed"
    assert told["DeepSeek-V3.2"] == ("no trees: The draft uses sparse attention", "shape")
    assert told["GLM-4.6-FP8"] == ("trees of up to 63 nodes", "exact")


def test_every_key_has_a_meaning() -> None:
    written = runpy.run_path(str(ROOT / ".ci" / "pages.py"))
    keys = [
        key.split("\n\n")
        for _, heading, section in written["SECTIONS"].values()
        for key in written["_keys"](section, heading)
    ]
    assert len(keys) > 40
    for heading, text, _ in keys:
        assert heading.startswith("###")
        assert re.fullmatch(r"(Required|Default \S.*); \S.*\. \S.*\.", text), heading


def test_every_lever_of_the_environment_is_in_a_page() -> None:
    """Levers that only our tests set are in none."""
    code = "".join(file.read_text() for part in PARTS for file in (ROOT / part).rglob("*.py"))
    levers = {*re.findall(r"VLLM_GRAFT_[A-Z_]+", code)}
    assert len(levers) > 3
    pages = "".join(page.read_text() for page in PAGES)
    unsaid = {lever for lever in levers if lever not in pages}
    assert unsaid == {"VLLM_GRAFT_PREFILL_RATE"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)


def anchor(heading: str) -> str:
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


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def clauses(page: str) -> list[str]:
    """Return the beginnings of sentences that begin with a clause, but for what code prints."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- (\w+):begin.*?<!-- \1:end", "", text, flags=re.DOTALL)
    text = re.sub(r"^(#|\| `).*$", "", text, flags=re.MULTILINE)  # Headings, rows of keys.
    begin = r"(?:^(?:[-*] |\d+\. |)|[.:|] )(?:\*\*)?((?:What|Where|Which)\b[^|?.]{,60}[|.?]?)"
    return [found for found in re.findall(begin, text, re.MULTILINE) if "?" not in found]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sentences_begin_with_their_subject(page: Path) -> None:
    assert clauses(page.read_text()) == []


def test_clauses_are_noticed() -> None:
    assert clauses("Yes. What it does is told.") == ["What it does is told."]
    assert clauses("- Where it fits it runs.\n\n# What is told\n")
    assert clauses("```\nWhat\n```\n| what | that |\n| `key` | What |\nx. Which one?\n") == []


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

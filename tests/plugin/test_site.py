"""The site of the documentation: it is built strictly, and is what the code prints."""

import importlib.util
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from tests.plugin.test_docs import PAGES, ROOT, name_of
from vllm_graft.cli import main
from vllm_graft.hicache.config.cache_config import HiCacheConfig, PrefetchConfig
from vllm_graft.spec_decode.config.tree_config import TreeConfig

SITE = ROOT / "docs" / "site"


def module_of(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load a script of the site as a module, which may import its neighbours."""
    monkeypatch.syspath_prepend(str(SITE))
    return module_of(SITE / f"{name}.py")


@pytest.fixture(scope="module")
def site() -> Iterator[ModuleType]:
    """The script that builds the site, as a module."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield script("build", monkeypatch)


@pytest.fixture(scope="module")
def built(site: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = site.build(site.prepare(tmp_path_factory.mktemp("site")))
    return folder


class Text(HTMLParser):
    """The text of a page without what is code."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("code", "pre", "script", "style"):
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        if not self.inside:
            self.found.append(data)


def left_over(page: str) -> list[str]:
    """Marks of Markdown that stand in the text of a page."""
    text = Text()
    text.feed(page)
    return re.findall(r"```|\|---|\]\([^)]*\)|^#+ ", " ".join(text.found), re.MULTILINE)


def test_each_page_is_on_the_site(site: ModuleType, built: Path) -> None:
    assert site.unlisted() == []
    places = [place for _, place in site.pages()]
    assert len(places) > 20
    for place in places:
        folder = re.sub(r"(README|index)?\.md$", "", place)
        assert (built / folder / "index.html").exists(), place


def test_each_page_of_the_repository_is_a_page_of_the_site(site: ModuleType) -> None:
    own = {name_of(page) for page in PAGES if "plugins" not in page.parts}
    assert {source for source, _ in site.pages()} == own | {"CHANGELOG.md"}


def test_no_markdown_is_left(built: Path) -> None:
    for page in built.rglob("*.html"):
        assert left_over(page.read_text()) == [], page
    assert left_over("<p>```</p> |---|") == ["```", "|---"]


def test_a_search_finds_each_key_by_its_heading(built: Path) -> None:
    index = json.loads((built / "search.json").read_text())
    # The rule by which the page in a browser splits texts and queries.
    assert re.split(index["config"]["separator"], "a host_bytes: 1") == ["a", "host_bytes", "1"]
    found = {item["location"]: re.sub(r"<[^>]+>", "", item["title"]) for item in index["items"]}
    for section, page in ((HiCacheConfig, "hicache"), (TreeConfig, "configuration")):
        prefix = "graft.tree." if section is TreeConfig else ""
        for key, field in section.model_fields.items():
            if field.annotation is not PrefetchConfig:
                title = f"{prefix}{key}"
                assert found[f"{page}/#{title.replace('.', '')}"] == title
    assert "hicache/#prefetchthreads" in found
    assert "hicache/#no_such_key" not in found


def test_nothing_is_loaded_from_elsewhere(built: Path) -> None:
    for page in built.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"([^\"]+)", page.read_text())
        loaded += re.findall(
            r"<link[^>]* rel=\"stylesheet\"[^>]* href=\"([^\"]+)", page.read_text()
        )
        assert [each for each in loaded if re.match(r"(https?:)?//", each)] == [], page


def test_links_to_nowhere_are_errors(site: ModuleType, tmp_path: Path) -> None:
    config = site.prepare(tmp_path)
    page = tmp_path / "docs" / "glossary.md"
    page.write_text(f"{page.read_text()}\n[a](nowhere.md) [b](plan.md#no-such-heading)\n")
    with pytest.raises(SystemExit, match=r"(?s)page does not exist.*anchor does not exist") as told:
        site.build(config)
    assert "2 issues found" in str(told.value)


def test_links_lead_to_pages_or_to_the_source(site: ModuleType) -> None:
    assert site.target("README.md", "docs/plan.md") == "plan.md"
    assert site.target("docs/examples/README.md", "../../README.md") == "../index.md"
    assert site.target("docs/plan.md", "nowhere.md") == "nowhere.md"
    source = site.target("docs/hooks.md", "../tests/sample_plugin")
    assert source == f"{site.URLS['Source']}/tree/main/tests/sample_plugin"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lists_read_alike_on_the_site_and_in_the_repository(page: Path) -> None:
    # Python-Markdown, which the site is made with, wants four spaces, and a line before a list.
    assert differently_read(page.read_text()) == []


def differently_read(page: str) -> list[str]:
    found, fenced, before, indented = [], False, "", False
    for line in page.splitlines():
        mark = line.lstrip().startswith("```")
        if mark and re.match(r" {1,3}`", line):
            found.append(line)
        fenced ^= mark
        if not before.strip():
            # Whether this paragraph belongs to an item of a list that began above it.
            indented = line.startswith("    ")
        item = re.match(r"([-*]|\d+\.) ", line)
        starts = item and (indented or re.match(r"(?!\d+\. )\w", before))
        if not fenced and (starts or re.match(r" {2,3}([-*]|\d+\.) ", line)):
            found.append(line)
        before = line
    return found


def test_lists_that_read_otherwise_are_noticed() -> None:
    assert differently_read("1. one\n\n   ```\n   x\n   ```") == ["   ```"] * 2
    assert differently_read("text\n- one") == ["- one"]
    assert differently_read("- one\n  - two") == ["  - two"]
    assert differently_read("1. one\n\n    more\n2. two") == ["2. two"]
    assert differently_read("text\n\n- one\n    - two\n") == []


def test_the_support_matrix_is_what_the_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["support", "--markdown"]) == 0
    page = (ROOT / "docs" / "support.md").read_text()
    _, _, rest = page.partition("<!-- support:begin -->\n")
    printed = capsys.readouterr().out
    assert rest.partition("<!-- support:end -->")[0] == printed, "run .ci/pages.py"
    assert printed.count("\n| ") > 60


def test_tables_of_results_are_those_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    results = script("results", monkeypatch)
    for name in results.PAGES:
        page = (ROOT / name).read_text()
        assert results.filled(page) == page, f"{name}: run .ci/pages.py"
        changed = re.sub(r"\| 1\.\d+", "| 9.99", page)
        assert changed != page
        assert results.filled(changed) != changed
    assert results.PLOT.read_text() == results.plot(), "run .ci/pages.py"


def test_the_first_table_of_the_page_on_performance_is_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = script("results", monkeypatch)
    names = re.findall(r"<!-- results:(?!end)([\w -]+) -->", (ROOT / results.PAGES[-1]).read_text())
    dates = [results.of_id(name)["date"] for name in names]
    assert len(dates) > 3
    assert dates[0] == max(dates) > min(dates)


def test_each_result_says_where_it_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    results = script("results", monkeypatch).results()
    assert len({each["id"] for each in results}) == len(results) > 30
    for each in results:
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", each["date"]), each["id"]
        assert re.match(r"[0-9a-f]{7}", each["commit"]), each["id"]
        assert all(each[key] for key in ("what", "figure", "hardware", "command")), each["id"]
        assert all(len(row) == len(each["columns"]) for row in each.get("rows", ())), each["id"]


def test_figures_are_what_their_scripts_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = script("figures", monkeypatch)
    for name, draw in figures.DRAWN.items():
        assert (figures.FIGURES / f"{name}.svg").read_text() == draw(), "run .ci/pages.py"


def test_files_in_figures_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = script("figures", monkeypatch)
    told = [part[-1] for part in (*figures.STEP, *figures.PARTS, *figures.PLACES)]
    parts = ("plugin", "spec_decode", "graph_runners", "hicache")
    known = {f"/{each.relative_to(ROOT)}" for part in parts for each in (ROOT / part).rglob("*")}
    known |= {f"/{part}" for part in parts}
    lost = [each for each in told if not any(place.endswith(f"/{each}") for place in known)]
    assert lost == []


def test_rooms_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = script("rooms", monkeypatch)
    page = rooms.PAGE.read_text()
    assert rooms.filled(page) == page, "run .ci/pages.py"
    assert len([*rooms.rooms()]) > 30
    assert rooms.filled(page.replace("| `hicache` |", "| `gone` |")) == page


def test_pictures_of_rooms_leave_out_what_follows() -> None:
    graph = module_of(next((ROOT / "tests").rglob("import_graph.py")))
    modules = {"vllm_graft": {"vllm_graft.a.b", "vllm_graft.c"}, "vllm_graft.a.b": {"vllm_graft.c"}}
    modules["vllm_graft.c"] = set()
    rooms = graph.room_graph(modules)
    assert rooms == {"front door": {"a", "c"}, "a": {"c"}, "c": set()}
    assert graph.without_shortcuts(rooms) == {"front door": {"a"}, "a": {"c"}, "c": set()}
    assert graph.room_graph(modules, "a") == {"b": set()}
    assert graph.picture(rooms).count("<line") == 2

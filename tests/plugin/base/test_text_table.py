"""Tables of the commands: plain in a pipe, drawn by rich in a terminal."""

import sys

import pytest

from vllm_graft.base.text_table import plain, table

ROWS = [("tree", "on", "trees of up to 63 nodes"), ("vit", "off", "[text] only")]
PLAIN = "part  state  why\ntree  on     trees of up to 63 nodes\nvit   off    [text] only\n"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")


def test_a_row_is_a_line_in_a_pipe() -> None:
    assert table(("part", "state", "why"), ROWS) == PLAIN
    long = [("a", "x" * 300)]
    assert table(("", ""), long) == f"a  {'x' * 300}\n"
    assert plain(("", ""), []) == ""


@pytest.mark.usefixtures("terminal")
def test_a_terminal_gets_colours_and_wrapped_cells() -> None:
    pytest.importorskip("rich")
    drawn = table(("part", "state", "why"), ROWS, {"on": "green"})
    assert "\x1b[32mon" in drawn
    assert "[text] only" in drawn
    wrapped = table(("", ""), [("a", "word " * 60)])
    assert max(map(len, wrapped.splitlines())) <= 60 < len(wrapped)


@pytest.mark.usefixtures("terminal")
def test_without_rich_it_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert table(("part", "state", "why"), ROWS, {"on": "green"}) == PLAIN

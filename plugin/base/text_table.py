"""Tables for people: drawn by rich in a terminal where it is installed, else text, or Markdown."""

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """A table with a title, whose texts may have Markdown's marks of code."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """The table without these marks, drawn by `table`."""
        title, heads, rows = (
            self.title.replace("`", ""),
            [head.replace("`", "") for head in self.heads],
            [[cell.replace("`", "") for cell in row] for row in self.rows],
        )
        return f"{title}\n{table(heads, rows)}".rstrip("\n")

    def markdown(self) -> str:
        """The table below its title as a heading."""
        return f"### {self.title}\n\n{markdown(self.heads, self.rows)}"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table in Markdown."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], styles: Mapping[str, str] | None = None
) -> str:
    """Draw a table, whose last column may be long; each line ends with a newline. In a terminal,
    cells are wrapped; in a file or a pipe each row is one line, which programs like grep can read.
    `styles` has rich's style for cells with such a text, as ``{"off": "dim"}``."""
    drawn = _drawn(heads, rows, styles or {}) if sys.stdout.isatty() else None
    return drawn if drawn is not None else plain(heads, rows)


def _drawn(
    heads: Sequence[str], rows: Sequence[Sequence[str]], styles: Mapping[str, str]
) -> str | None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return None
    drawn = Table(*heads, box=None, pad_edge=False, show_header=any(heads))
    for row in rows:
        drawn.add_row(*(Text(cell, styles.get(cell, "")) for cell in row))
    console = Console(markup=False, highlight=False)
    with console.capture() as captured:
        console.print(drawn)
    return captured.get()


def plain(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as text without colours, a line for each row."""
    lines = [heads, *rows] if any(heads) else [*rows]
    *fixed, last = range(len(heads))
    widths = [max((len(line[column]) for line in lines), default=0) for column in fixed]
    return "".join(
        "  ".join([*(line[column].ljust(widths[column]) for column in fixed), line[last]]) + "\n"
        for line in lines
    )

"""Write the table of rooms into the page on architecture: ``python docs/site/rooms.py``.

A room is a folder of code. Its line is the first sentence of its ``__init__``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
PARTS = ("plugin", "spec_decode", "graph_runners", "hicache")

BEGIN, END = "<!-- rooms:begin -->\n", "<!-- rooms:end -->"


def rooms() -> Iterator[tuple[str, str]]:
    """Yield each folder that has modules, with the first sentence of its docstring."""
    for part in PARTS:
        for file in sorted((ROOT / part).rglob("__init__.py")):
            if any(each != file for each in file.parent.glob("*.py")):
                text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
                sentence = text.split(". ")[0].rstrip(".").replace("``", "`")
                yield str(file.parent.relative_to(ROOT)), sentence


def filled(page: str) -> str:
    """Return the page's text with the table as the code has it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = "".join(f"| `{name}` | {text} |\n" for name, text in rooms())
    return f"{before}{BEGIN}\n| room | what is in it |\n|---|---|\n{rows}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))

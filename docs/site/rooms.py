"""Write the table of rooms into the page on architecture: ``python docs/site/rooms.py``.

A room is a folder of code. Its line is the first sentence of its ``__init__``. Rooms within a room
are left to it.
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
    """Yield the folders, with the first sentence of its docstring."""
    for part in PARTS:
        inner = [each for each in (ROOT / part).glob("*/") if not each.is_symlink()]
        for folder in sorted([ROOT / part, *inner]):
            file = folder / "__init__.py"
            if file.exists() and (folder in inner or len([*folder.glob("*.py")]) > 1):
                text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
                sentence = text.split(". ")[0].rstrip(".").replace("``", "`")
                yield str(folder.relative_to(ROOT)), sentence


def filled(page: str) -> str:
    """Return the page's text with the table as the code has it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = "".join(f"| `{name}` | {text} |\n" for name, text in rooms())
    return f"{before}{BEGIN}\n| room | what is in it |\n|---|---|\n{rows}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))

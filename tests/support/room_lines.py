"""How many lines of Python each room has.

``python tests/support/room_lines.py > tests/room_lines.json`` writes what `tests/test_layers.py`
allows: each room may have as many lines as it has now, and up to nine more.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("graph_runners", "hicache", "plugin", "spec_decode")
"""Folders whose rooms count by themselves; the other ones count as a whole."""

WHOLE = ("benchmarks", "tests")
SLACK = 0.05
"""Share of a room's lines that its number may be above them."""


def room_lines(root: Path = ROOT) -> dict[str, int]:
    """Count the lines of each room; a part's own files are a room of the part's name."""
    count: Counter[str] = Counter()
    for part in (*PARTS, *WHOLE):
        for file in (root / part).rglob("*.py"):
            below = file.relative_to(root).parts
            room = part if part in WHOLE or len(below) == 2 else "/".join(below[:2])
            count[room] += len(file.read_bytes().splitlines())
    return dict(sorted(count.items()))


def allowed(lines: int) -> int:
    """The number that is written for a room: full tens, unless that is far above the room."""
    tens = -(-lines // 10) * 10
    return tens if tens <= lines * (1 + SLACK) else lines


def problems(found: Mapping[str, int], table: Mapping[str, int]) -> list[str]:
    """Say which numbers of the table do not fit the rooms."""
    said = []
    for room in sorted(found.keys() | table.keys()):
        lines, number = found.get(room, 0), table.get(room, 0)
        if lines > number:
            said.append(f"{room} has {lines} lines, its number is {number}: {CHANGE}")
        elif number > lines * (1 + SLACK):
            said.append(f"{room} has only {lines} lines, its number is {number}: {CHANGE}")
    return said


CHANGE = "cut lines, or change the number in tests/room_lines.json and say why in the commit"


if __name__ == "__main__":
    print(json.dumps({room: allowed(lines) for room, lines in room_lines().items()}, indent=1))

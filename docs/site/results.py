"""Write the tables and the plot of measured results: ``python docs/site/results.py``.

`docs/results.json` has every figure once. This script fills the places between
``<!-- results:NAME -->`` and ``<!-- results:end -->`` of the pages, where NAME is a product
(one row per measurement), a result (its table) or ``headlines`` (the README's). It draws
`docs/figures/speed.svg`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from drawing import ACCENT, GREY, LINE, picture, rectangle, words

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results.json"
PLOT = ROOT / "docs" / "figures" / "speed.svg"
PAGES = ("README.md", "docs/results.md", "docs/performance.md")

Result = dict[str, Any]

_PLACE = re.compile(r"(<!-- results:(?!end)([\w -]+) -->\n).*?(<!-- results:end -->)", re.DOTALL)


@cache
def results() -> tuple[Result, ...]:
    """Return all results, in the file's order."""
    return tuple(json.loads(RESULTS.read_text())["results"])


def of_id(name: str) -> Result:
    """Return the result of a name."""
    return next(each for each in results() if each["id"] == name)


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def product_table(product: str) -> str:
    """Return the measurements of a product, a row each."""
    head = ["what was measured", "figure", "date, commit", "hardware", "command"]
    rows = [
        [
            each["what"],
            each["figure"],
            f"{each['date']}, {each['commit']}",
            each["hardware"],
            f"`{each['command']}`",
        ]
        for each in results()
        if each["product"] == product
    ]
    return _table(head, rows)


def result_table(name: str) -> str:
    """Return the table of a single result."""
    result = of_id(name)
    return _table(result["columns"], result["rows"])


def headlines() -> str:
    """Return what stands in the README: in few words, over stock vLLM."""
    rows = [row for each in results() for row in each.get("headlines", ())]
    return _table(["speed over the best that stock vLLM has", "times"], rows)


def filled(page: str) -> str:
    """Return a page's text with its tables as the results have them."""
    products = {each["product"] for each in results()}

    def fill(place: re.Match[str]) -> str:
        if place[2] == "headlines":
            return f"{place[1]}\n{headlines()}\n{place[3]}"
        table: Callable[[str], str] = product_table if place[2] in products else result_table
        return f"{place[1]}\n{table(place[2])}\n{place[3]}"

    return _PLACE.sub(fill, page)


WIDTH, HEIGHT, TOP, LEFT, PANEL = 720, 270, 56, 44, 306
"""The plot and its two panels, in pixels."""

FLOOR = HEIGHT - 50
ARMS = {"stock vLLM's faster way of speculating": GREY, "--additional-config.graft auto": ACCENT}


def _bar(x: float, height: float, color: str, label: str) -> list[str]:
    top = round(FLOOR - height, 1)
    return [
        rectangle(x, top, 26, round(height, 1), color),
        words(x + 13, round(top - 4), label, size=10),
    ]


def _panel(left: float, rows: list[list[Any]], scale: float) -> list[str]:
    """Draw the rows of a temperature: for each number of requests the faster stock arm and ours."""
    drawn = [words(left + PANEL / 2, TOP - 8, f"temperature {rows[0][1]}", size=13)]
    for place, (requests, _, chain, ngrams, ours, _) in enumerate(rows):
        stock, x = max(chain, ngrams), left + 12 + place * PANEL / len(rows)
        height = ours / stock * scale
        drawn += _bar(x, scale, GREY, f"{stock}") + _bar(x + 28, height, ACCENT, f"{ours}")
        gain = f"{ours / stock:.1f}x"
        drawn.append(words(x + 41, FLOOR - 8, gain, size=9, style='fill="#fff"'))
        drawn.append(words(x + 27, FLOOR + 16, f"{requests}"))
    return [*drawn, rectangle(left, FLOOR, PANEL, 1, LINE)]


def plot() -> str:
    """Draw tokens per second over requests, ours and stock's strongest arm, as SVG."""
    rows = of_id("served")["rows"]
    by_temperature = [[row for row in rows if row[1] == each] for each in (0, 1)]
    highest = max(row[4] / max(row[2], row[3]) for row in rows)
    drawn = []
    for place, (label, color) in enumerate(ARMS.items()):
        x = LEFT + 310 * place
        drawn += [rectangle(x, 10, 12, 12, color), words(x + 18, 20, label, anchor="start")]
    for place, panel in enumerate(by_temperature):
        drawn += _panel(LEFT + (PANEL + 24) * place, panel, (FLOOR - TOP - 16) / highest)
    foot = "requests at a time. Numbers are tokens per second; each pair is scaled to stock's."
    drawn.append(words(WIDTH / 2, HEIGHT - 10, foot))
    return picture(WIDTH, HEIGHT, "Tokens per second, stock vLLM and ours", drawn)


def main() -> None:
    """Write the plot and the pages' tables."""
    PLOT.parent.mkdir(exist_ok=True)
    PLOT.write_text(plot())
    for page in PAGES:
        file = ROOT / page
        file.write_text(filled(file.read_text()))


if __name__ == "__main__":
    main()

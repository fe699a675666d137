"""Write the figures of README and architecture: ``python docs/site/figures.py``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from drawing import ACCENT, GREY, Box, arrow, picture, rectangle, words

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"


STEP = (
    ("1 extend", "The draft reads the accepted rows.", "drafters/target_dependent.py"),
    ("2 levels", "The best nodes get topk children,", "drafters/levels.py"),
    ("3 finish", "The N best nodes are the tree.", "kernels/candidates.py"),
    ("4 verify", "The target runs once over all nodes.", "dense/layer.py"),
    ("5 walk", "Draw at each node, follow the draws.", "kernels/verify.py"),
    ("6 compact", "K/V of the path moves together.", "kernels/compact.py"),
)
"""The stages of a step, round a ring: three to the right, three back."""

SPOTS = {"r": (0, 28), "a": (48, 12), "b": (48, 44), "c": (96, 0), "d": (96, 24), "e": (96, 48)}
SPOTS |= {"f": (144, 16), "g": (144, 36)}
EDGES, TAKEN = ("ra", "rb", "ac", "ad", "be", "df", "dg"), "radf"
"""A tree of drafts, whose accepted path has another colour."""


def _tree(x: float, y: float) -> list[str]:
    drawn = []
    for edge in EDGES:
        (x0, y0), (x1, y1) = SPOTS[edge[0]], SPOTS[edge[1]]
        color = ACCENT if {*edge} <= {*TAKEN} else GREY
        ends = f'x1="{x + x0}" y1="{y + y0}" x2="{x + x1}" y2="{y + y1}"'
        drawn.append(f'<line {ends} stroke="{color}" stroke-width="1.6"/>')
    for name, (x0, y0) in SPOTS.items():
        color = ACCENT if name in TAKEN else "#fff"
        drawn.append(f'<circle cx="{x + x0}" cy="{y + y0}" r="6" fill="{color}" stroke="{GREY}"/>')
    notes = ((-44, 32, "root"), (160, 20, "accepted path, then the target's"))
    for x0, y0, note in (*notes, (160, 34, "own draw: the next root")):
        drawn.append(words(x + x0, y + y0, note, anchor="start", size=11))
    return drawn


def step() -> str:
    """Draw a tree step: what drafts, verifies and accepts."""
    columns, rows = (14, 264, 514), (14, 192)
    ring = [*((x, rows[0]) for x in columns), *((x, rows[1]) for x in reversed(columns))]
    boxes = [Box(x, y, 220, *text) for (x, y), text in zip(ring, STEP, strict=True)]
    top, bottom = rows[0] + 28, rows[1] + 28
    arrows = [
        *(arrow((x + 220, top), (x + 248, top)) for x in columns[:2]),
        arrow((624, rows[0] + 56), (624, rows[1] - 2)),
        *(arrow((x, bottom), (x - 28, bottom)) for x in columns[:0:-1]),
        arrow((124, rows[1]), (124, rows[0] + 58)),
    ]
    note = words(374, rows[0] + 72, "level by level, as one CUDA graph", size=11)
    drawn = [*arrows, *(box.draw() for box in boxes), note, *_tree(210, 104)]
    return picture(748, 262, "A step with a tree of drafts", drawn)


def _group(x: float, y: float, width: float, height: float, title: str) -> str:
    frame = rectangle(x, y, width, height, "#fafbff", f'stroke="{GREY}" stroke-dasharray="5 4"')
    return frame + words(x + 10, y + 18, title, anchor="start", style='font-weight="bold"')


PROCESSES = (
    (10, 190, "frontend"),
    (240, 230, "engine core"),
    (510, 250, "worker, one per GPU"),
)
PARTS = (
    (20, 38, 170, "flags", "read, decided, refused", "plugin/activation.py"),
    (20, 134, 170, "/metrics", "what the parts counted", "plugin/metrics"),
    (250, 38, 210, "scheduler", "nodes and prompts of a step", "spec_decode/tuning"),
    (250, 100, 210, "grammars", "a mask for each node", "spec_decode/grammars"),
    (250, 162, 210, "host cache: plan", "what to load and store", "hicache/planning"),
    (520, 38, 112, "drafter", "grows trees", "drafters"),
    (640, 38, 112, "target", "verifies them", "targets"),
    (520, 100, 112, "graphs", "language", "graph_runners"),
    (640, 100, 112, "graphs", "vision", "graph_runners"),
    (520, 162, 232, "host cache: copies", "between GPU, host and storage", "hicache/rank"),
)


def processes() -> str:
    """Draw where our classes stand in vLLM's processes."""
    groups = [_group(x, 10, width, 214, title) for x, width, title in PROCESSES]
    arrows = [
        arrow((200, 66), (238, 66)),
        arrow((470, 66), (508, 66)),
        arrow((508, 190), (472, 190)),
        arrow((238, 162), (202, 162)),
    ]
    drawn = [*groups, *arrows, *(Box(*part).draw() for part in PARTS)]
    return picture(770, 234, "Our classes in vLLM's processes", drawn)


PLACES = (
    (14, 96, 170, "GPU", "blocks of vLLM's cache", "hicache/pages"),
    (300, 96, 170, "host memory", "pages in slots, pinned", "hicache/host"),
    (586, 96, 170, "storage", "checked records", "hicache/storage"),
    (240, 10, 290, "the scheduler's plan", "prefix, cost, slots, fences", "hicache/planning"),
)


def host_cache() -> str:
    """Draw the ways of a page of K/V."""
    arrows = [
        arrow((184, 114), (298, 114), label="store"),
        arrow((300, 140), (186, 140), label="load"),
        arrow((470, 114), (584, 114), label="write behind"),
        arrow((586, 140), (472, 140), label="read ahead"),
        arrow((385, 66), (385, 94), dashed=True),
    ]
    drawn = [*arrows, *(Box(*place).draw() for place in PLACES)]
    return picture(770, 162, "The ways of a page of K/V", drawn)


def rooms(*part: str) -> str:
    """Draw which room of the code imports which; of a part, if one is named."""
    script = next((ROOT / "tests").rglob("import_graph.py"))
    command = [sys.executable, str(script), "--svg", *part]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


DRAWN: dict[str, Callable[[], str]] = {
    "step": step,
    "processes": processes,
    "host_cache": host_cache,
    "rooms": rooms,
    "rooms_spec_decode": partial(rooms, "spec_decode"),
}
"""The figures by the names of their files."""


def main() -> None:
    """Write all figures."""
    FIGURES.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        (FIGURES / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()

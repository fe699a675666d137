"""Small pictures as SVG text: boxes, arrows and words. Lengths are pixels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from xml.sax.saxutils import escape

INK, PALE, LINE, ACCENT, GREY = "#222", "#eef1fb", "#66708a", "#3f51b5", "#9aa5b1"

_MARKER = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker>'
)


def words(
    x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, style: str = ""
) -> str:
    """Draw a line of text; ``anchor`` is ``start``, ``middle`` or ``end``."""
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}{f' {style}' if style else ''}>{escape(text)}</text>"


def rectangle(x: float, y: float, width: float, height: float, fill: str, extra: str = "") -> str:
    """Draw a rectangle with rounded corners."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="4" fill="{fill}"{f" {extra}" if extra else ""}/>'


def arrow(*points: tuple[float, float], label: str = "", dashed: bool = False) -> str:
    """Draw an arrow through points, with a label above the middle of its first part."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    style = f'fill="none" stroke="{LINE}" stroke-width="1.4" marker-end="url(#tip)"'
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    line = f'<polyline points="{path}" {style}{dashes}/>'
    (x0, y0), (x1, y1) = points[:2]
    return line + (words((x0 + x1) / 2, (y0 + y1) / 2 - 6, label, size=11) if label else "")


@dataclass(frozen=True)
class Box:
    """A box with a title, a line below it, and the file that does what it says."""

    x: float
    y: float
    width: float
    title: str
    line: str
    file: str

    height = 56

    def draw(self) -> str:
        """Draw the box and what is in it."""
        middle = self.x + self.width / 2
        style = f'font-family="monospace" fill="{ACCENT}"'
        return "".join(
            [
                rectangle(self.x, self.y, self.width, self.height, PALE, f'stroke="{GREY}"'),
                words(middle, self.y + 18, self.title, style='font-weight="bold"'),
                words(middle, self.y + 34, self.line, size=11),
                words(middle, self.y + 48, self.file, size=10, style=style),
            ]
        )


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Put parts into an SVG document with a white ground."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" fill="{INK}"><title>{escape(title)}</title>{_MARKER}'
    )
    return "\n".join([head, rectangle(0, 0, width, height, "#fff"), *parts, "</svg>"]) + "\n"

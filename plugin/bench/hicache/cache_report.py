"""Rows of a run, comparisons made from them, a table and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

COPIES = (
    ("H2D copy", "h2d_share", ">= 0.95"),
    ("D2H copy", "d2h_share", ">= 0.95"),
    ("both at once", "both_share", ">= 0.85"),
    ("H2D layer by layer", "layers_share", ">= 0.90"),
)
"""Comparisons with memcpy: the title, the row's key, and the aim."""


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1e6) * len(ordered) // 10**6) - 1))]


class Report:
    """Collect rows, and print each at once: a run that is cut short leaves its rows."""

    def __init__(self, path: Path | None, show: Callable[[str], None]) -> None:
        self.rows: list[Row] = []
        self._path, self._show = path, show

    def add(self, part: str, arm: str, found: Row) -> Row:
        """Keep and print a row of a part."""
        row = {"part": part, "arm": arm, **found}
        self.rows.append(row)
        self._show("ROW " + json.dumps(short(row)))
        if self._path:
            self._path.write_text(json.dumps(self.rows, indent=1) + "\n")
        return row

    def values(self, part: str, arm: str, key: str) -> list[float]:
        """Return values of `key` in the rows of a part and an arm that have it."""
        return [
            row[key]
            for row in self.rows
            if row["part"] == part and row["arm"] == arm and row.get(key) is not None
        ]

    def median(self, part: str, arm: str, key: str) -> float | None:
        """Return the median of :meth:`values`; None without any."""
        values = self.values(part, arm, key)
        return statistics.median(values) if values else None


def short(row: Row) -> Row:
    """Shorten a row for a line of a log: without long lists, with fewer digits."""
    shown: Row = {}
    for key, value in row.items():
        if isinstance(value, list) and len(value) > 8:
            if value and isinstance(value[0], int | float):
                shown[f"{key}_p50"] = percentile(value, 0.5)
                shown[f"{key}_p99"] = percentile(value, 0.99)
        else:
            shown[key] = round(value, 4) if isinstance(value, float) else value
    return shown


def table(head: list[str], lines: list[list[str]]) -> str:
    """Lay out a Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def number(value: float | None, form: str = ".2f") -> str:
    """Format the value, or a dash for None."""
    return "-" if value is None else format(value, form)


def first_tokens(report: Report, arm: str) -> list[float]:
    """Return times to first token (ms) of all rounds of an arm's load test; empty without one."""
    rows = [row for row in report.rows if row["part"] == "load" and row["arm"] == arm]
    return [ms for row in rows for ms in row.get("ttft_ms", [])]


def arms_table(report: Report, arms: list[str]) -> str:
    """Lay out a line per arm: the medians of every part."""
    lines = []
    for arm in arms:
        ttft = first_tokens(report, arm)
        lines.append(
            [
                arm,
                number(report.median("ttft", arm, "ms"), ".1f"),
                number(report.median("ttft", arm, "cached"), ".0f"),
                number(report.median("decode", arm, "tokens_per_second"), ".0f"),
                number(report.median("decode", arm, "with_prefill"), ".0f"),
                number(report.median("decode", arm, "full"), ".0f"),
                number(report.median("load", arm, "turns_per_second")),
                number(percentile(ttft, 0.5) if ttft else None, ".0f"),
                number(percentile(ttft, 0.99) if ttft else None, ".0f"),
                number(report.median("load", arm, "hit_rate")),
            ]
        )
    head = ["arm", "TTFT ms", "cached tokens", "decode tokens/s", "with prefill", "FULL steps"]
    return table([*head, "load turns/s", "TTFT p50 ms", "TTFT p99 ms", "hit rate"], lines)


def ratio(top: float | None, bottom: float | None) -> float | None:
    """Return the quotient; None where a value is missing."""
    return None if top is None or not bottom else top / bottom


def comparisons(report: Report, arms: list[str]) -> list[tuple[str, float | None, str]]:
    """Compare every arm of ours with the first of each other kind: (what, value, aim)."""
    first = {arm.partition(":")[0]: arm for arm in reversed(arms)}
    found: list[tuple[str, float | None, str]] = []
    for copier in dict.fromkeys(row["arm"] for row in report.rows if row["part"] == "copy"):
        # Rows of fp8 and BLHNC are only printed; runs are the case that 2D copies serve.
        if copier == "engine" or copier.startswith("engine runs"):
            where = copier.removeprefix("engine").strip() or "scattered blocks"
            found += [
                (f"{what}, {where} / best memcpy", report.median("copy", copier, key), aim)
                for what, key, aim in COPIES
            ]
    for arm in arms:
        if arm.partition(":")[0] == "ours":
            found += _against(report, arm, first.get("native", ""), first.get("none", ""))
    for row in report.rows:
        if row["part"] == "race" and "requests" in row:
            what = f"wrong answers of {row['requests']} in the race, {row['arm']} loads"
            found.append((what, row["wrong"], "0"))
    return [line for line in found if line[1] is not None]


def _against(
    report: Report, ours: str, native: str, none: str
) -> list[tuple[str, float | None, str]]:
    """Compare one arm of ours with vLLM's own connector and with none."""

    def beside(part: str, key: str, other: str) -> float | None:
        return ratio(report.median(part, ours, key), report.median(part, other, key))

    def tail(arm: str) -> float | None:
        values = first_tokens(report, arm)
        return percentile(values, 0.99) if values else None

    return [
        (f"TTFT of a host hit, {ours} / native", beside("ttft", "ms", native), "<= 0.80"),
        (f"TTFT of a host hit, {ours} / none", beside("ttft", "ms", none), "<= 0.15"),
        (f"decode rate, {ours} / none", beside("decode", "tokens_per_second", none), ">= 0.98"),
        (f"decode rate, {ours} / native", beside("decode", "tokens_per_second", native), ">= 1.00"),
        (f"load turns/s, {ours} / native", beside("load", "turns_per_second", native), ">= 1.15"),
        (f"load p99 TTFT, {ours} / native", ratio(tail(ours), tail(native)), "<= 1.00"),
    ]


def bars_table(report: Report, arms: list[str]) -> str:
    """Lay out each comparison, its value and its aim."""
    lines = [[what, number(value, ".3f"), bar] for what, value, bar in comparisons(report, arms)]
    return table(["comparison", "found", "aim"], lines)


def plot(report: Report, arms: list[str], path: Path) -> str:
    """Write an SVG of three panels; returns a line that says what happened."""
    try:
        import matplotlib  # type: ignore[import-not-found]
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6))
    panels = (
        ("ttft", "ms", "time to first token of a host hit, ms"),
        ("decode", "tokens_per_second", "decode under write-back, tokens/s"),
        ("load", "turns_per_second", "load test, turns/s"),
    )
    for axis, (part, key, title) in zip(axes, panels, strict=True):
        values = [report.median(part, arm, key) or 0.0 for arm in arms]
        axis.bar_label(axis.bar([arm.partition(":")[0] for arm in arms], values), fmt="%.4g")
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    return f"plot: {path}"

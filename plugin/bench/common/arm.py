"""Arms of a comparison, their rows, a row for each case, and the command of the fastest arm."""

import argparse
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_graft.base import text_table
from vllm_graft.bench.common import report
from vllm_graft.bench.common.report import Panel


@dataclass(frozen=True, eq=False)
class Arm:
    """An engine with options of ``vllm.LLM``, and the columns of the table that it fills. `drafts`
    are lengths of its chains, one column each; empty if the engine itself decides. `commands` serve
    what the columns measure. `per_gpu` are bytes on a GPU without K/V, and of a token, if known."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    drafts: tuple[int, ...] = ()
    commands: Mapping[str, str] = field(default_factory=dict)
    per_gpu: tuple[int, int] | None = None

    @property
    def columns(self) -> dict[str, int | None]:
        """Drafts to fix for each column; None where nothing is to be fixed."""
        fixed: dict[str, int | None] = {
            re.sub(":[0-9,]+", f":{count}", self.name, count=1): count for count in self.drafts
        }
        return fixed or {self.name: None}


def is_ours(column: str) -> bool:
    """Whether a column is an arm of vllm-graft."""
    return column.startswith(("graft", "tree:", "auto:", "ours"))


@dataclass(frozen=True)
class Row:
    """What one column (`arm`) did in one case, which all arms were asked alike. `figures`: medians
    of the rounds by name, None where one is unknown. Arms are compared by the first; of a name that
    ends in ``_ms`` the shorter one is better. `rounds`: the first figure in each round. `more`:
    what else is written into the JSON file."""

    arm: str
    case: dict[str, Any]
    figures: dict[str, float | None]
    rounds: list[float] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def main(self) -> tuple[str, float]:
        name = next(iter(self.figures))
        return name, self.figures[name] or 0.0

    def flat(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            **self.case,
            **self.figures,
            "rounds": self.rounds,
            **self.more,
        }


def median_row(
    arm: str,
    case: Mapping[str, Any],
    rounds: Sequence[Mapping[str, float | None]],
    **more: Any,
) -> Row:
    """Take the median of each figure of the rounds, which have the same figures in one order."""
    figures: dict[str, float | None] = {}
    for name in rounds[0]:
        known = [value for each in rounds if (value := each[name]) is not None]
        figures[name] = round(statistics.median(known), 3) if known else None
    main = next(iter(figures))
    firsts = [round(each[main] or 0.0, 3) for each in rounds]
    return Row(arm, dict(case), figures, firsts, more)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0 to 1) of the values do not exceed."""
    if not values or not 0 <= share <= 1:
        raise ValueError(f"percentile {share} of {len(values)} values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(rows: Sequence[Row], cell: Callable[[Row], str], *, compare: bool = True) -> str:
    """Lay out a table: a line per case, a column per arm, `cell` in each place. The last column is
    how many times as fast the best of ours is as the best of the others. A dash is no row."""
    arms = list(dict.fromkeys(row.arm for row in rows))
    lines = []
    for case, found in _by_case(rows):
        by_arm = {row.arm: row for row in found}
        shown = [cell(by_arm[arm]) if arm in by_arm else "-" for arm in arms]
        lines.append([*map(_text, case.values()), *shown, *([_ratio(found)] if compare else [])])
    if not rows:
        return ""
    head = [*rows[0].case, *arms, *(["ours / best other"] if compare else [])]
    return text_table.table(head, lines)


def panels(rows: Sequence[Row], over: str, shown: Mapping[str, str]) -> list[Panel]:
    """Draw the figures of `shown`, which has their axes' texts, over a numeric part of the case."""
    series: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        rest = ", ".join(f"{key} {_text(each)}" for key, each in row.case.items() if key != over)
        for name in shown:
            value = row.figures.get(name)
            if value is not None:
                lines = series.setdefault((rest, name), {})
                lines.setdefault(row.arm, []).append((row.case[over], value))
    # Lengths are near each other, rates and times are not.
    return [
        Panel(rest, over, shown[name], lines, "x" if name.endswith("length") else "xy")
        for (rest, name), lines in series.items()
    ]


def write_files(
    arguments: argparse.Namespace,
    rows: Sequence[Row],
    drawn: list[Panel],
    commands: Mapping[str, str] | None = None,
) -> None:
    """Write the rows with their commands, and draw them, where ``--output`` and ``--plot`` say."""
    if arguments.output:
        told = [{**row.flat(), "command": (commands or {}).get(row.arm)} for row in rows]
        report.write_json(arguments.output, told)
    if arguments.plot:
        report.plot(arguments.plot, drawn)


def _by_case(rows: Sequence[Row]) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    for number, first in enumerate(rows):
        if all(row.case != first.case for row in rows[:number]):
            yield first.case, [row for row in rows if row.case == first.case]


def _ratio(rows: Sequence[Row]) -> str:
    name = rows[0].main[0]
    ours = [row.main[1] for row in rows if is_ours(row.arm)]
    others = [row.main[1] for row in rows if not is_ours(row.arm)]
    if not ours or not others:
        return "-"
    best, least = (min(others), min(ours)) if name.endswith("_ms") else (max(ours), max(others))
    # In a short time an arm may end no turn at all.
    return f"{best / least:.2f}" if least else "-"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


NOISE = 1.02
"""Ours is faster from this ratio on: medians of one engine differ by a percent or two."""


def advice(rows: Sequence[Row], commands: Mapping[str, str]) -> str:
    """The command to use, and how many times as fast it is as the best arm of the other side. Arms
    are compared by the geometric mean over all cases, because one command serves them all; an arm
    that lacks a case, or is not in `commands`, is no candidate."""
    speeds: dict[str, dict[str, float]] = {}
    cases = {str(row.case) for row in rows}
    for row in rows:
        name, value = row.main
        if value > 0:
            speeds.setdefault(row.arm, {})[str(row.case)] = (
                1 / value if name.endswith("_ms") else value
            )
    score = {
        arm: math.fsum(map(math.log, found.values()))
        for arm, found in speeds.items()
        if found.keys() == cases and arm in commands
    }
    ours, stock = (
        max((arm for arm in score if is_ours(arm) is mine), key=lambda arm: score[arm], default="")
        for mine in (True, False)
    )
    if not score:
        return "no arm served all loads: there is no command to advise."
    if not ours or not stock:
        best = ours or stock
        return f"use this command: {commands[best]} ({best}; nothing was compared with it)"
    ratio = math.exp((score[ours] - score[stock]) / len(cases))
    others = [found for arm, found in speeds.items() if not is_ours(arm)]
    beside = [speeds[ours][case] / max(each.get(case, 0.0) for each in others) for case in cases]
    spread = f"; {min(beside):.2f} to {max(beside):.2f} x load by load" if len(cases) > 1 else ""
    if ratio >= NOISE:
        said = f"{ratio:.2f} x stock's best, {stock}{spread}"
        return f"use this command: {commands[ours]} ({said})"
    said = f"{stock}, stock's best: ours, {ours}, is no faster, {ratio:.2f} x{spread}"
    return f"use this command: {commands[stock]} ({said})"

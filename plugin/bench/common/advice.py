"""A benchmark's last line: the command of the fastest arm, whoever's it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from vllm_graft.bench.common.arm import Row, is_ours

NOISE = 1.02
"""Ours is faster from this ratio on: medians of one engine differ by a percent or two."""


def advice(rows: Sequence[Row], commands: Mapping[str, str]) -> str:
    """The command to use, and how many times as fast it is as the best arm of the other side.

    Arms are compared by the geometric mean over all cases, because one command serves them all; an
    arm that lacks a case is no candidate.

    Args:
        rows: a row for each arm and case.
        commands: the command that serves what an arm of a name measures.
    """
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

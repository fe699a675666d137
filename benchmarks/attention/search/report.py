"""What a search prints and writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.attention.search.candidates import short
from benchmarks.attention.search.measuring import Found, Timing


def lines(found: Found, best: int) -> list[str]:
    """A problem: the platform's kernel, today's plan and the best few."""
    head = found.problem.name
    if found.copied:
        head += f": a copy takes {found.copied:.1f} us"
    out = [head]
    out += [f"    {time:7.2f}  {name}" for name, time in found.others.items()]
    out += [f"          -  {name}: {why}" for name, why in found.failures.items()]
    if found.today:
        out.append(_line(found.today, "today "))
    out += [_line(each, "") for each in found.ranked()[:best]]
    wrong = [each for each in found.timings if each.failure]
    out += [f"    wrong or not run: {short(each.plan)}: {each.failure}" for each in wrong[:5]]
    if len(wrong) > 5:
        out.append(f"    ... and {len(wrong) - 5} more that did not run")
    return out


def _line(timing: Timing, label: str) -> str:
    stack = max((each.stack_bytes for each in timing.built), default=0)
    first = timing.built[0] if timing.built else None
    notes = [f"error {timing.error:.4f}"] if timing.error is not None else []
    notes += [f"{first.registers} registers, {first.shared_bytes >> 10} KiB"] if first else []
    notes += [f"stack {stack} bytes"] if stack > 0 else []
    if timing.best == float("inf"):
        return f"          -  {label}{short(timing.plan)}: {timing.failure}"
    return f"    {timing.best:7.2f}  {label}{short(timing.plan)}  ({', '.join(notes)})"


def write(file: Path | None, about: dict[str, Any], found: Sequence[Found]) -> None:
    """Write all that is known so far, in one step, so that a cut never leaves half a file."""
    if file is None:
        return
    parts = [each.plain() for each in found if each.timings]
    beside = file.with_name(file.name + ".part")
    beside.write_text(json.dumps({**about, "problems": parts}))
    beside.replace(file)

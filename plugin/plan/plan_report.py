"""A plan for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vllm_graft.plan.memory import HOST, Memory
from vllm_graft.plan.planning import Plan

_HEADS = {"parts": ("part", "state", "why"), "memory": ("memory", "size", "where it is from")}


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan for programs."""
    return {**asdict(plan), "verdict": plan.verdict.name.lower(), "status": plan.verdict.value}


def render(plan: Plan) -> str:
    """The plan for people; tables are drawn by rich where it is installed."""
    lines = [f"planned for {plan.device}"]
    for name, text in (("target", plan.target), ("drafts", plan.drafts)):
        lines += [f"{name}: {text}"] if text else []
    tables = {
        "parts": [(part.name, part.state, part.reason) for part in plan.parts],
        "memory": [(row.what, _size(row), row.says) for row in plan.memory],
    }
    lines += ["", *(_table(_HEADS[name], rows) for name, rows in tables.items() if rows)]
    if plan.refused:
        lines += ["refused: the server would not start.", plan.refused]
    else:
        lines += ["serve it with:", f"  {plan.command}"]
    return "\n".join(lines)


def _size(row: Memory) -> str:
    if row.num_bytes is None:
        return "unknown"
    per = "" if row.per == HOST else f" per {row.per}"
    for unit, size in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if row.num_bytes >= 1 << size:
            return f"{row.num_bytes / (1 << size):.1f} {unit}{per}"
    return f"{row.num_bytes} bytes{per}"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return _plain(heads, rows)
    table = Table(*heads, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False, soft_wrap=False)
    with console.capture() as drawn:
        console.print(table)
    return drawn.get()


def _plain(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    *fixed, last = range(len(heads))
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in fixed]
    lines = [
        "  ".join([*(row[column].ljust(widths[column]) for column in fixed), row[last]])
        for row in (heads, *rows)
    ]
    return "\n".join([*lines, ""])

"""A plan for people and for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm_graft.base.text_table import table
from vllm_graft.base.values import human
from vllm_graft.plan.memory import HOST, Memory
from vllm_graft.plan.planning import Plan

_HEADS = {"parts": ("part", "state", "why"), "memory": ("memory", "size", "where it is from")}
_STYLES = {"on": "green", "off": "dim", "refused": "bold red", "unknown": "yellow"}


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan for programs."""
    return {**asdict(plan), "verdict": plan.verdict.name.lower(), "status": plan.verdict.value}


def render(plan: Plan) -> str:
    """The plan for people."""
    lines = [f"planned for {plan.device}"]
    for name, text in (("target", plan.target), ("drafts", plan.drafts)):
        lines += [f"{name}: {text}"] if text else []
    tables = {
        "parts": [(part.name, part.state, part.reason) for part in plan.parts],
        "memory": [(row.what, _size(row), row.says) for row in plan.memory],
    }
    lines += ["", *(table(_HEADS[name], rows, _STYLES) for name, rows in tables.items() if rows)]
    if plan.refused:
        lines += ["refused: the server would not start.", plan.refused]
    else:
        lines += ["serve it with:", f"  {plan.command}"]
    if plan.better:
        lines += [f"or, for {plan.better[0]}:", f"  {plan.better[1]}"]
    return "\n".join(lines)


def _size(row: Memory) -> str:
    if row.num_bytes is None:
        return "unknown"
    return human(row.num_bytes) + ("" if row.per == HOST else f" per {row.per}")

"""Tables and plots of rows, a column or a curve for each arm."""

from __future__ import annotations

from vllm_graft.base import markdown
from vllm_graft.bench.common import report
from vllm_graft.bench.common.engine_arms import is_ours
from vllm_graft.bench.common.step_bytes import step_cell
from vllm_graft.bench.trees.arm_rows import Row


def step_table(rows: list[Row]) -> str:
    """Lay out milliseconds of a step, tokens per pass over the target's weights, bandwidth used."""
    arms = list(dict.fromkeys(row.arm for row in rows))
    cases = dict.fromkeys((row.temperature, row.batch) for row in rows)
    by_case = {(row.temperature, row.batch, row.arm): row for row in rows}
    lines = []
    for temperature, batch in cases:
        cells = (by_case.get((temperature, batch, arm)) for arm in arms)
        shown = [
            step_cell(c.step_ms, c.tokens_per_step, c.bandwidth_use) if c else "-" for c in cells
        ]
        lines.append([f"{temperature:g}", str(batch), *shown])
    return markdown.table(["temperature", "batch", *arms], lines)


def table(rows: list[Row]) -> str:
    """Lay out a Markdown table: a line per case, a column per arm, acceptance length in brackets.

    The last column is the best of ours over the best of the others, where there are both. An arm
    without a row for a case has a dash.
    """
    arms = list(dict.fromkeys(row.arm for row in rows))
    cases = dict.fromkeys((row.temperature, row.batch) for row in rows)
    by_case = {(row.temperature, row.batch, row.arm): row for row in rows}
    lines = []
    for temperature, batch in cases:
        cells = [by_case.get((temperature, batch, arm)) for arm in arms]
        shown = [
            f"{cell.tokens_per_second:.0f} ({cell.acceptance_length:.2f})" if cell else "-"
            for cell in cells
        ]
        lines.append([f"{temperature:g}", str(batch), *shown, _ratio(list(filter(None, cells)))])
    return markdown.table(["temperature", "batch", *arms, "ours / best other"], lines)


def _ratio(cells: list[Row]) -> str:
    ours = [cell.tokens_per_second for cell in cells if is_ours(cell.arm)]
    others = [cell.tokens_per_second for cell in cells if not is_ours(cell.arm)]
    return f"{max(ours) / max(others):.2f}" if ours and others else "-"


def panels(rows: list[Row]) -> list[report.Panel]:
    """Draw tokens per second and acceptance length over batch size, for each temperature."""
    found = []
    for temperature in dict.fromkeys(row.temperature for row in rows):
        rates: dict[str, list[tuple[float, float]]] = {}
        lengths: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.temperature == temperature:
                rates.setdefault(row.arm, []).append((row.batch, row.tokens_per_second))
                lengths.setdefault(row.arm, []).append((row.batch, row.acceptance_length))
        title = f"temperature {temperature:g}"
        found.append(report.Panel(title, "batch size", "tokens per second", rates, "xy"))
        found.append(report.Panel(title, "batch size", "mean acceptance length", lengths, "x"))
    return found

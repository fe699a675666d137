"""Wall time of a call, arm beside arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_graft.bench.timing import Deadline, Spread, in_turns
from vllm_graft.bench.vit.arms import Arm


@dataclass(frozen=True)
class SpeedRow:
    """One arm on one workload.

    Attributes:
        tower: its name.
        workload: what was run.
        patches: of a call.
        arm: its name.
        median: milliseconds a call, wall, from the call to the device's end.
        p99: likewise, 99th percentile.
        runs: calls that were timed.
        graphed: whether the arm's manager answered, rather than the model.
    """

    tower: str
    workload: str
    patches: int
    arm: str
    median: float
    p99: float
    runs: int
    graphed: bool


def settle(arm: Arm, inputs: Mapping[str, Any], calls: int, deadline: Deadline) -> None:
    """Run the input before it is timed; what is measured is the steady state."""
    arm.prewarm(inputs)
    for _ in range(calls):
        arm.finished(inputs)
        if deadline.passed:
            return


def measure(
    tower: str,
    workload: str,
    patches: int,
    arms: Sequence[Arm],
    inputs: Mapping[str, Any],
    blocks: int,
    per_block: int,
    warm: int,
    deadline: Deadline,
) -> list[SpeedRow]:
    """Warm every arm up on the input, then time them in turns."""
    for arm in arms:
        settle(arm, inputs, warm, deadline)
    before = {arm.name: arm.eager_calls for arm in arms}
    calls = {arm.name: partial(arm.finished, inputs) for arm in arms}
    found = in_turns(calls, blocks, per_block, deadline=deadline)
    rows = []
    for arm in arms:
        spread = Spread.of([1000 * seconds for seconds in found[arm.name]])
        graphed = arm.manager is not None and arm.eager_calls == before[arm.name]
        rows.append(
            SpeedRow(
                tower,
                workload,
                patches,
                arm.name,
                round(spread.median, 3),
                round(spread.p99, 3),
                len(found[arm.name]),
                graphed,
            )
        )
    return rows


def ratios(rows: Sequence[SpeedRow]) -> dict[str, float]:
    """How often ours is as fast as eager, as stock, and as the faster of both (medians).

    Args:
        rows: of one workload; with an arm missing, so is its ratio.
    """
    median = {row.arm: row.median for row in rows}
    if "ours" not in median:
        return {}
    others: dict[str, float] = {name: median[name] for name in ("eager", "stock") if name in median}
    found: dict[str, float] = {name: value / median["ours"] for name, value in others.items()}
    if len(found) == 2:
        found["best"] = min(found.values())
    return found


def line(rows: Sequence[SpeedRow]) -> list[str]:
    """The cells of one workload: tower, workload, patches, a cell an arm, then the ratios.

    Milliseconds, median and 99th percentile; ``*`` marks an answer that came from the model, as the
    manager declined.
    """
    first = rows[0]
    cells = [
        f"{row.median:.2f} ({row.p99:.2f}){'' if row.graphed or row.arm == 'eager' else '*'}"
        for row in rows
    ]
    found = ratios(rows)
    shown = [f"{found[name]:.2f}" if name in found else "-" for name in RATIOS]
    return [first.tower, first.workload, str(first.patches), *cells, *shown]


RATIOS = ("eager", "stock", "best")


def header(arms: Sequence[str]) -> list[str]:
    """The head of the table that :func:`line` fills."""
    return [
        "tower",
        "workload",
        "patches",
        *(f"{arm} ms (p99)" for arm in arms),
        *(f"{name} / ours" for name in RATIOS),
    ]

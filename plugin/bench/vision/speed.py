"""Time calls of all arms, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_graft.bench.common.timing import Deadline, Spread, in_turns
from vllm_graft.bench.vision.arms import Arm


@dataclass(frozen=True)
class SpeedRow:
    """One arm on one workload.

    Attributes:
        tower: name of the tower.
        workload: name of the workload.
        patches: patches per call.
        arm: name of the arm.
        median: milliseconds per call, wall, from the call to the device's end.
        p99: likewise, 99th percentile.
        runs: calls that were timed.
        graphed: whether the arm's manager answered, rather than the model.
        host: milliseconds until a call returns, the device still being at work; median.
        replay: milliseconds of the device in graph replays alone; median, None without one.
    """

    tower: str
    workload: str
    patches: int
    arm: str
    median: float
    p99: float
    runs: int
    graphed: bool
    host: float | None = None
    replay: float | None = None

    @property
    def answered_by_model(self) -> bool:
        """Whether there is a manager and it left the call to the model."""
        return not self.graphed and not self.arm.startswith("eager")


PROBES = 5
"""Number of calls whose host and replay times are measured."""


def settle(arm: Arm, inputs: Mapping[str, Any], calls: int, deadline: Deadline) -> None:
    """Run the input before it is timed, so that the steady state is measured."""
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
        host, replay = probe(arm, inputs)
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
                host,
                replay,
            )
        )
    return rows


def probe(arm: Arm, inputs: Mapping[str, Any]) -> tuple[float, float | None]:
    """Measure median milliseconds of host and of replays, after the timed calls.

    It comes after them because it would slow them down. The wall time beyond the longer of the two
    is copies, clones and waits.
    """
    host = statistics.median(arm.host_seconds(inputs) for _ in range(PROBES))
    found = [arm.replay_seconds(inputs) for _ in range(PROBES)]
    replays = [seconds for seconds in found if seconds is not None]
    replay = round(1000 * statistics.median(replays), 3) if replays else None
    return round(1000 * host, 3), replay


def ratios(rows: Sequence[SpeedRow]) -> dict[str, float]:
    """Return how many times as fast ours is as eager, as stock, and as the faster one (medians).

    Args:
        rows: rows of one workload; a ratio is missing where its arm is.
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
    """Return cells: tower, workload, patches, a cell per arm, parts of ours, ratios.

    A cell of an arm has milliseconds, median and 99th percentile; ``*`` marks an answer that came
    from the model, because the manager declined.
    """
    first = rows[0]
    cells = [
        f"{row.median:.2f} ({row.p99:.2f}){'*' if row.answered_by_model else ''}" for row in rows
    ]
    ours = next((row for row in rows if row.arm == "ours"), None)
    parts = (None, None) if ours is None else (ours.host, ours.replay)
    cells += ["-" if part is None else f"{part:.2f}" for part in parts]
    found = ratios(rows)
    shown = [f"{found[name]:.2f}" if name in found else "-" for name in RATIOS]
    return [first.tower, first.workload, str(first.patches), *cells, *shown]


RATIOS = ("eager", "stock", "best")


def header(arms: Sequence[str]) -> list[str]:
    """Return the head of the table that :func:`line` fills."""
    return [
        "tower",
        "workload",
        "patches",
        *(f"{arm} ms (p99)" for arm in arms),
        "ours: host",
        "ours: replay",
        *(f"{name} / ours" for name in RATIOS),
    ]

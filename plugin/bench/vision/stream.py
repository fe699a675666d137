"""Run a stream of requests from a cold start: total time, time in captures, memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_graft.bench.common.timing import Deadline
from vllm_graft.bench.vision.arms import Arm, Machine, make
from vllm_graft.bench.vision.image_cases import Batch
from vllm_graft.bench.vision.random_towers import Pixels

EVERY = 50
"""Requests between two readings of the clock, which need a wait for the device."""


@dataclass
class StreamRow:
    """One arm on the stream.

    Attributes:
        tower: name of the tower.
        arm: name of the arm.
        start: seconds from construction to the end of ``capture()``.
        cumulative: how many requests were answered, and the seconds since the start of the stream.
        requests: how many were answered.
        in_captures: seconds in captures while requests waited, as the manager counts them; None
            where it does not.
        bytes: growth of the allocator's memory since before the arm was made, caches freed.
        statistics: the manager's counters at the end.
    """

    tower: str
    arm: str
    start: float
    cumulative: list[tuple[int, float]] = field(default_factory=list)
    requests: int = 0
    in_captures: float | None = None
    bytes: int = 0
    statistics: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of all answered requests."""
        return self.cumulative[-1][1] if self.cumulative else 0.0


def run(
    tower: str,
    kind: str,
    model: Any,
    machine: Machine,
    stream: Sequence[Batch],
    pixels: Pixels,
    deadline: Deadline,
) -> StreamRow:
    """Make the arm and give it the stream, one request after the other."""
    forget(model.visual)
    held = machine.memory() - (machine.shared() if kind.startswith("ours") else 0)
    started = time.perf_counter()
    arm = make(kind, model, machine)
    try:
        row = StreamRow(tower, kind, round(time.perf_counter() - started, 3))
        _answer(arm, row, stream, pixels, deadline)
        # Memory that the model itself keeps is not counted for the arm.
        forget(model.visual)
        row.bytes = machine.memory() - held
    finally:
        clear(arm)
    return row


def _answer(
    arm: Arm, row: StreamRow, stream: Sequence[Batch], pixels: Pixels, deadline: Deadline
) -> None:
    """Give the arm the stream, and enter times and counters into its row."""
    at_start = capture_seconds(arm.statistics())
    started = time.perf_counter()
    for number, batch in enumerate(stream, start=1):
        arm.finished(pixels.of(batch, number))
        row.requests = number
        if number % EVERY == 0 or number == len(stream):
            row.cumulative.append((number, time.perf_counter() - started))
            if deadline.passed:
                break
    row.statistics = arm.statistics()
    spent = capture_seconds(row.statistics)
    if spent is not None:
        row.in_captures = spent - (at_start or 0.0)


def forget(visual: Any) -> None:
    """Empty a tower's caches of positions, so that the next arm starts as cold as the first."""
    for value in vars(visual).values():
        if type(value).__name__ == "LRUCache":
            value.clear()


def capture_seconds(statistics: Mapping[str, Any]) -> float | None:
    """Read seconds in captures from a manager's counters."""
    for name in ("capture_seconds", "seconds_in_captures"):
        if name in statistics:
            return float(statistics[name])
    return None


def clear(arm: Arm) -> None:
    """Free an arm's graphs."""
    if arm.manager is not None:
        arm.manager.clear()


def faster(row: StreamRow, other: StreamRow) -> tuple[float, int] | None:
    """Divide the time of ``row`` by that of ``other``, over the first requests that both answered.

    Returns:
        the ratio, and how many requests these are; None if there are none.
    """
    mine, theirs = dict(row.cumulative), dict(other.cumulative)
    both = mine.keys() & theirs.keys()
    return (mine[max(both)] / theirs[max(both)], max(both)) if both else None


HEADER = (
    "tower",
    "arm",
    "requests",
    "seconds",
    "ms per request",
    "start s",
    "captures",
    "MiB",
    "ours / this (over the first)",
)


def line(row: StreamRow, ours: StreamRow | None) -> list[str]:
    """Return the row of the report."""
    share = "-"
    if row.in_captures is not None and row.seconds:
        share = f"{row.in_captures:.2f} s, {100 * row.in_captures / row.seconds:.1f} %"
    ratio = faster(ours, row) if ours is not None else None
    return [
        row.tower,
        row.arm,
        str(row.requests),
        f"{row.seconds:.2f}",
        f"{1000 * row.seconds / max(1, row.requests):.2f}",
        f"{row.start:.2f}",
        share,
        f"{row.bytes / 2**20:.0f}",
        "-" if ratio is None else f"{ratio[0]:.2f} ({ratio[1]})",
    ]

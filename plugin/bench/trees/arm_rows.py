"""A row for each column of an arm and each case: the medians of its rounds."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from vllm_graft.bench.common.closed_loop import Measured
from vllm_graft.bench.common.node_counts import Nodes
from vllm_graft.bench.common.step_bytes import StepBytes


@dataclass(frozen=True)
class Row:
    """Medians of one column in one case; `nodes` are of its last round."""

    arm: str
    temperature: float
    batch: int
    tokens_per_second: float
    acceptance_length: float
    rounds: list[float]
    step_ms: float = 0.0
    tokens_per_step: float = 0.0
    bandwidth_use: float | None = None
    nodes: Nodes = field(default_factory=dict)


def make_row(
    column: str,
    temperature: float,
    batch: int,
    results: list[Measured],
    needed: StepBytes | None,
) -> Row:
    """Take the medians of a column's rounds."""
    uses = [needed.use(m.step, m.held) if needed else None for m in results]
    known = [use for use in uses if use is not None]
    return Row(
        column,
        temperature,
        batch,
        round(statistics.median(m.rate for m in results), 1),
        round(statistics.median(m.acceptance for m in results), 3),
        [round(m.rate, 1) for m in results],
        round(statistics.median(m.step for m in results) * 1e3, 3),
        round(statistics.median(m.rate * m.step for m in results), 3),
        round(statistics.median(known), 3) if known else None,
        results[-1].nodes,
    )

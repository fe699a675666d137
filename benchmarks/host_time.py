"""Measure the host's time per step, from schedule to last launch: stock's chain and our trees.

    python -m benchmarks.host_time PAIR --arms chain:5 'tree:31@[[1,16,31],[17,64,4]]' auto:63

PAIR holds `target/`, `eagle3/` and `prompts.json`, as `tests/pair` does; `--target` and `--draft`
name other folders. Arms are stock's chain, trees (with vLLM's number of nodes by batch size, if
given), and `shape: auto` up to a number. Each has a process of its own with the engine in it; all
start together and are measured one after another. Wall time is taken around the scheduler's and
the model runner's methods of a step; the GPU is not waited for, so that a method that takes long
waits for the device itself, or for room in its queue of launches. Steps with prompts, and the
first of each batch, are left out.

`schedule` and `update` are the scheduler's (with `auto` the tuner is in them), `execute` and
`sample` the model runner's; `propose`, the drafting, is a part of `sample`. `host` is the sum.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.bars.host_clock import PARTS, WARM_UP, Watch
from benchmarks.engine_processes import (
    Plan,
    answer,
    engine_options,
    parser_of,
    plan_of,
    running,
    start,
)
from vllm_graft.base import markdown
from vllm_graft.bench.common import report

ARMS = ["chain:5", "tree:31@[[1,16,31],[17,64,4]]", "auto:63"]
SIZES = [1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 320, 384, 512]
"""Graph sizes in rows for batches of 1, 16 and 64: a chain of 5, trees of 31 and of 4 nodes."""


@dataclass(frozen=True)
class Row:
    """One arm at one batch size: microseconds of host time per step."""

    arm: str
    batch: int
    steps: int
    median: dict[str, float]
    p90: dict[str, float]


def summary(arm: str, batch: int, steps: list[dict[str, float]]) -> Row:
    """Return the median and 90th percentile of each part and of the host's whole time."""
    counted = steps[WARM_UP:]
    if len(counted) < 2:
        raise RuntimeError(
            f"{arm}: {len(steps)} steps of {batch} decodes, and {WARM_UP} of them warm up: raise "
            "--tokens"
        )
    columns = {part: [step[part] * 1e6 for step in counted] for part in PARTS}
    columns["host"] = [
        sum(step[part] for part in PARTS if part != "propose") * 1e6 for step in counted
    ]
    return Row(
        arm,
        batch,
        len(counted),
        {part: round(statistics.median(times), 1) for part, times in columns.items()},
        {part: round(statistics.quantiles(times, n=10)[8], 1) for part, times in columns.items()},
    )


def measure(arm: str, plan: Plan, llm: Any) -> list[Row]:
    """Run one arm at every batch size."""
    from vllm import SamplingParams

    rows, watch = [], Watch()
    core: Any = llm.llm_engine.engine_core
    for batch in plan.batches:
        prompts = [plan.prompts[i % len(plan.prompts)] for i in range(batch)]
        params = SamplingParams(
            temperature=plan.temperature, max_tokens=plan.tokens, ignore_eos=True
        )
        # This run compiles kernels, and `auto` learns in it.
        llm.generate(prompts, params, use_tqdm=False)
        with watch.watching(core.engine_core, batch) as steps:
            llm.generate(prompts, params, use_tqdm=False)
        rows.append(summary(arm, batch, steps))
    return rows


def serve(pipe: Connection, arm: str, plan: Plan) -> None:
    """Run an arm's process: say that its engine is up, and measure when told to."""
    with running(plan, engine_options(arm, plan)) as llm:
        pipe.send(None)
        pipe.recv()
        pipe.send(measure(arm, plan, llm))


def in_turn(arms: list[str], plan: Plan) -> list[Row]:
    """Start all arms at once, each in a process of its own, and measure one after another.

    Raises:
        SystemExit: a process died.
    """
    pipes = start(arms, serve, plan)
    rows: list[Row] = []
    for arm, pipe in pipes.items():
        pipe.send(None)
        found: list[Row] = answer(arm, pipe)
        rows += found
        for row in found:
            print(json.dumps(asdict(row)), flush=True)
    return rows


def table(rows: list[Row]) -> str:
    """Lay out a line per arm and batch: medians (90th percentiles), host over the first arm's."""
    first = {row.batch: row.median["host"] for row in rows if row.arm == rows[0].arm}
    lines = [
        [
            str(row.batch),
            row.arm,
            str(row.steps),
            *(f"{row.median[part]:.0f} ({row.p90[part]:.0f})" for part in (*PARTS, "host")),
            f"{row.median['host'] / first[row.batch]:.2f}",
        ]
        for row in sorted(rows, key=lambda row: row.batch)
    ]
    head = ["batch", "arm", "steps", *(f"{part} µs" for part in (*PARTS, "host")), "/ first arm"]
    return markdown.table(head, lines)


def main(arguments: list[str]) -> int:
    given = parser_of(
        __doc__.splitlines()[0], arms=ARMS, batches=[1, 16, 64], tokens=400, sizes=SIZES
    ).parse_args(arguments)
    memory = 0.9 / len(given.arms)
    plan = plan_of(given, max_model_len=2048, gpu_memory_utilization=memory)
    rows = in_turn(given.arms, plan)
    print(table(rows), flush=True)
    if given.json:
        report.write_json(given.json, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measure first tokens of requests that arrive in a burst: stock's arms and our trees.

    python -m benchmarks.bursts PAIR --arms block:4+fp8 ngram:5 auto:63+fp8+ngram --batch 16 64

PAIR holds `target/`, `eagle3/` and `prompts.json`. Each arm has a process of its own with the
engine in it; all start together and take turns. A burst is so many requests with prompts of their
own, one every `--gap` milliseconds, into an engine that has nothing else to do. Each request's time
runs from its arrival to its first token. `steps` says of the burst with the median last first token
which steps the engine scheduled until then: milliseconds since the first arrival, and rows.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

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
from vllm_graft.bench.common.arm import percentile

ARMS = ["block:4+fp8", "auto:63+fp8+ngram"]
SIZES = [1, 2, 4, 6, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512]


@dataclass(frozen=True)
class Step:
    """A step that the engine scheduled: milliseconds since the first arrival, and rows."""

    at: float
    rows: int


@dataclass(frozen=True)
class Burst:
    """One burst: milliseconds to each request's first token, and the steps until the last."""

    first_tokens: list[float]
    steps: list[Step]


@contextmanager
def scheduled(core: Any) -> Iterator[list[tuple[float, int]]]:
    """Note when an engine core schedules a step, and its rows."""
    steps: list[tuple[float, int]] = []

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def schedule(*args: Any, **kwargs: Any) -> Any:
            at, output = time.perf_counter(), original(*args, **kwargs)
            if output.total_num_scheduled_tokens:
                steps.append((at, output.total_num_scheduled_tokens))
            return output

        return schedule

    scheduler = core.scheduler
    with mock.patch.object(scheduler, "schedule", noted(scheduler.schedule)):
        yield steps


def burst(engine: Any, prompts: list[str], params: Any, gap: float, name: str) -> Burst:
    """Send a burst to an engine and wait until it has answered.

    Args:
        engine: vLLM's ``LLMEngine`` with its core in this process.
        prompts: one per request.
        params: how all are answered.
        gap: seconds between two arrivals.
        name: a prefix of the requests' names that no other burst has.
    """
    arrivals: dict[str, float] = {}
    first: dict[str, float] = {}
    with scheduled(engine.engine_core.engine_core) as steps:
        began = time.perf_counter()
        while engine.has_unfinished_requests() or len(arrivals) < len(prompts):
            while len(arrivals) < len(prompts):
                due = began + gap * len(arrivals)
                if time.perf_counter() < due:
                    break
                request = f"{name}-{len(arrivals)}"
                engine.add_request(request, prompts[len(arrivals)], params)
                arrivals[request] = due
            for output in engine.step():
                if output.outputs[0].token_ids:
                    first.setdefault(output.request_id, time.perf_counter())
    last = max(first.values())
    return Burst(
        [1e3 * (first[request] - arrival) for request, arrival in arrivals.items()],
        [Step(round(1e3 * (at - began), 1), rows) for at, rows in steps if at < last],
    )


@dataclass(frozen=True)
class Row:
    """One arm at one size of bursts, in milliseconds."""

    arm: str
    batch: int
    bursts: int
    median: float
    p99: float
    last: float
    steps: list[Step]


def summary(arm: str, batch: int, bursts: list[Burst]) -> Row:
    """Say what bursts of one size had: all first tokens together, and the median last one."""
    times = list(itertools.chain.from_iterable(each.first_tokens for each in bursts))
    by_last = sorted(bursts, key=lambda each: max(each.first_tokens))
    middle = by_last[len(by_last) // 2]
    return Row(
        arm,
        batch,
        len(bursts),
        round(statistics.median(times), 1),
        round(percentile(times, 0.99), 1),
        round(max(middle.first_tokens), 1),
        middle.steps,
    )


def serve(pipe: Connection, arm: str, plan: Plan, gap: float) -> None:
    """Run an arm's process: say that its engine is up, then answer each burst it is told of."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=plan.temperature, max_tokens=plan.tokens, ignore_eos=True, detokenize=False
    )
    prompts = itertools.cycle(plan.prompts)
    with running(plan, engine_options(arm, plan)) as llm:
        pipe.send(None)
        for number in itertools.count():
            batch: int | None = pipe.recv()
            if batch is None:
                return
            texts = list(itertools.islice(prompts, batch))
            pipe.send(burst(llm.llm_engine, texts, params, gap, f"burst{number}"))


def in_turn(arms: list[str], plan: Plan, bursts: int, gap: float) -> list[Row]:
    """Start all arms at once, and send bursts to one after another, a request each `gap` seconds.

    The first burst of each size compiles kernels and is not counted.

    Raises:
        SystemExit: a process died.
    """
    pipes = start(arms, serve, plan, gap)
    rows: list[Row] = []
    for batch in plan.batches:
        found: dict[str, list[Burst]] = {arm: [] for arm in arms}
        for number in range(bursts + 1):
            for arm in arms[:: -1 if number % 2 else 1]:
                pipes[arm].send(batch)
                measured: Burst = answer(arm, pipes[arm])
                if number:
                    found[arm].append(measured)
        for arm in arms:
            rows.append(summary(arm, batch, found[arm]))
            print(json.dumps(asdict(rows[-1])), flush=True)
    for pipe in pipes.values():
        pipe.send(None)
    return rows


def table(rows: list[Row]) -> str:
    """Lay out a line per arm and size of bursts."""
    lines = [
        [
            str(row.batch),
            row.arm,
            *(f"{value:.0f}" for value in (row.median, row.p99, row.last)),
            ", ".join(f"{step.at:.0f}: {step.rows}" for step in row.steps[:10]),
        ]
        for row in rows
    ]
    return markdown.table(["burst", "arm", "p50 ms", "p99 ms", "last ms", "steps"], lines)


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__.splitlines()[0], arms=ARMS, batches=[16, 64], tokens=24, sizes=SIZES)
    parser.add_argument("--bursts", type=int, default=10, help="of each size and arm")
    parser.add_argument("--gap", type=float, default=1.0, help="milliseconds between arrivals")
    given = parser.parse_args(arguments)
    plan = plan_of(
        given, max_model_len=4096, max_num_batched_tokens=8192, gpu_memory_utilization=0.1
    )
    rows = in_turn(given.arms, plan, given.bursts, given.gap / 1e3)
    print(table(rows), flush=True)
    if given.json:
        report.write_json(given.json, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

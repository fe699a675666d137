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

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.bars.host_clock import PARTS, WARM_UP, Watch
from vllm_graft.base import markdown
from vllm_graft.bench.common import report
from vllm_graft.bench.common.engine_arms import read_arm

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


@dataclass(frozen=True)
class Plan:
    """The work of each arm's process."""

    target: Path
    draft: Path
    prompts: list[str]
    batches: list[int]
    temperature: float
    tokens: int
    options: dict[str, Any]


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


def engine_options(arm: str, plan: Plan) -> dict[str, Any]:
    """Return the options of `vllm.LLM` that make an arm.

    Raises:
        SystemExit: the arm's name can't be read, or names no single chain or tree.
    """
    options = dict(plan.options)
    tree = options.pop("tree")
    try:
        found = read_arm(arm, plan.draft, tree["topk"], tree["steps"], options["max_num_seqs"])
    except report.BenchmarkError as error:
        sys.exit(str(error))
    if found.drafts or not found.options:
        sys.exit(f"--arms {arm!r}: one chain or tree an arm")
    return {**options, **found.options}


@contextmanager
def running(plan: Plan, options: dict[str, Any]) -> Iterator[Any]:
    """Run an engine in this process, on the GPU where there is one."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    if torch.cuda.is_available():
        from vllm import LLM

        yield LLM(str(plan.target), enable_prefix_caching=False, **options)
        return
    from vllm_graft.testing import cpu_engine

    options = {key: value for key, value in options.items() if key in CPU_OPTIONS}
    with cpu_engine(plan.target, enable_prefix_caching=False, **options) as llm:
        yield llm


CPU_OPTIONS = ("speculative_config", "additional_config", "max_num_seqs")


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
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for arm in arms:
        pipes[arm], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, arm, plan)).start()
        theirs.close()
    rows: list[Row] = []
    for arm, pipe in pipes.items():
        _answer(arm, pipe)
    for arm, pipe in pipes.items():
        pipe.send(None)
        found: list[Row] = _answer(arm, pipe)
        rows += found
        for row in found:
            print(json.dumps(asdict(row)), flush=True)
    return rows


def _answer(arm: str, pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        sys.exit(f"arm {arm}: its process died; its log is above")


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", type=Path)
    parser.add_argument("--target", type=Path, help="instead of PAIR/target")
    parser.add_argument("--draft", type=Path, help="an EAGLE-3 head, instead of PAIR/eagle3")
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=400, help="tokens per request")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--kv-cache-bytes", type=int, default=2**32, help="of each engine")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    plan = Plan(
        given.target or given.pair / "target",
        given.draft or given.pair / "eagle3",
        json.loads((given.pair / "prompts.json").read_text()),
        given.batch,
        given.temperature,
        given.tokens,
        {
            "tree": {"topk": given.topk, "steps": given.steps},
            "max_num_seqs": max(given.batch),
            "max_model_len": 2048,
            # It is given because engines that start together can't measure how much memory is left.
            "kv_cache_memory_bytes": given.kv_cache_bytes,
            "gpu_memory_utilization": 0.9 / len(given.arms),
            "compilation_config": {"cudagraph_capture_sizes": given.sizes},
        },
    )
    rows = in_turn(given.arms, plan)
    print(table(rows), flush=True)
    if given.json:
        report.write_json(given.json, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Tokens a second of the tree beside stock vLLM: no speculation, and chains of several lengths.

    vllm-graft bench eagle PAIR --arms none chain:5 chain:7 tree:31 --batch 1 4 16 64

PAIR holds `target/`, `eagle3/` and `prompts.json`, as `tests/pair` does. All arms are up at the
same time, each in a process of its own with its share of the GPU's memory, and take turns at
every temperature and batch size, `--rounds` times; the table has the medians. An arm is `none`,
`chain:K` (stock vLLM with K drafts), `tree:N` (N nodes; `--topk`, `--steps`), or `tree:N@RANGES`
with the number of nodes by batch size in vLLM's own form, `tree:31@[[1,1,31],[2,8,15]]`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_graft.bench import report

SUMMARY = "tokens a second of the tree, of chains and without speculation"


@dataclass(frozen=True)
class Case:
    """What one measurement does: `batch` requests at once, until `requests` were answered."""

    temperature: float
    batch: int
    requests: int
    max_tokens: int


@dataclass(frozen=True)
class Measured:
    """Tokens a second, and the mean acceptance length (bonus token included; 1 without drafts)."""

    rate: float
    acceptance: float


@dataclass(frozen=True)
class Row:
    """Medians of one arm in one case."""

    arm: str
    temperature: float
    batch: int
    tokens_per_second: float
    acceptance_length: float
    rounds: list[float]


def engine_options(arm: str, pair: Path, topk: int, steps: int) -> dict[str, Any]:
    """Options of `vllm.LLM` that make an arm.

    Raises:
        SystemExit: the arm's name can't be read.
    """
    kind, _, rest = arm.partition(":")
    count, _, ranges = rest.partition("@")
    if kind == "none":
        return {}
    if kind not in ("chain", "tree") or not count.isdigit():
        sys.exit(f"--arms {arm!r}: say none, chain:K, tree:N or tree:N@RANGES")
    speculative: dict[str, Any] = {
        "method": "eagle3",
        "model": str(pair / "eagle3"),
        "num_speculative_tokens": int(count),
    }
    if ranges:
        speculative["num_speculative_tokens_per_batch_size"] = json.loads(ranges)
    options: dict[str, Any] = {"speculative_config": speculative}
    if kind == "tree":
        options["additional_config"] = {"graft": {"eagle": {"topk": topk, "steps": steps}}}
    return options


@contextmanager
def running(target: Path, options: dict[str, Any]) -> Iterator[Any]:
    """An engine: of the GPU where there is one, else in this process through the interpreter."""
    import torch

    if torch.cuda.is_available():
        from vllm import LLM

        yield LLM(str(target), disable_log_stats=False, enable_prefix_caching=False, **options)
        return
    from vllm_graft.testing import cpu_engine

    options.pop("gpu_memory_utilization")
    with cpu_engine(target, enable_prefix_caching=False, **options) as llm:
        yield llm


def measure(llm: Any, prompts: list[str], case: Case) -> Measured:
    """Run one case."""
    from vllm import SamplingParams

    from vllm_graft.testing import spec_metrics

    params = SamplingParams(
        temperature=case.temperature, max_tokens=case.max_tokens, ignore_eos=True
    )
    before, start, tokens = spec_metrics(llm), time.perf_counter(), 0
    for first in range(0, case.requests, case.batch):
        chosen = [prompts[(first + i) % len(prompts)] for i in range(case.batch)]
        for output in llm.generate(chosen, params, use_tqdm=False):
            tokens += len(output.outputs[0].token_ids)
    seconds, after = time.perf_counter() - start, spec_metrics(llm)
    drafts = after.drafts - before.drafts
    accepted = after.accepted_tokens - before.accepted_tokens
    return Measured(tokens / seconds, 1 + accepted / drafts if drafts else 1.0)


def serve(pipe: Connection, target: Path, options: dict[str, Any], prompts: list[str]) -> None:
    """An arm's process: start the engine, then answer every `Case` with a `Measured`."""
    with running(target, options) as llm:
        pipe.send("ready")
        while (case := pipe.recv()) is not None:
            pipe.send(measure(llm, prompts, case))


def compare(arguments: argparse.Namespace) -> list[Row]:
    """Start all arms, let them take turns, and return a row for each arm and case."""
    pair: Path = arguments.pair
    prompts = json.loads((pair / "prompts.json").read_text())
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for arm in arguments.arms:
        options = engine_options(arm, pair, arguments.topk, arguments.steps)
        options["max_model_len"] = arguments.max_model_len
        options["max_num_seqs"] = max(arguments.batch)
        options["gpu_memory_utilization"] = 0.9 / len(arguments.arms)
        ours, theirs = context.Pipe()
        started = time.perf_counter()
        context.Process(target=serve, args=(theirs, pair / "target", options, prompts)).start()
        theirs.close()
        try:
            ours.recv()
        except EOFError:
            sys.exit(f"arm {arm}: its engine did not start; its log is above")
        print(f"{arm}: ready after {time.perf_counter() - started:.0f} s", flush=True)
        pipes[arm] = ours
    rows = [
        row
        for temperature in arguments.temperature
        for batch in arguments.batch
        for row in take_turns(pipes, arguments, temperature, batch)
    ]
    for pipe in pipes.values():
        pipe.send(None)
    return rows


def take_turns(
    pipes: dict[str, Connection], arguments: argparse.Namespace, temperature: float, batch: int
) -> list[Row]:
    """Measure one case on every arm in turn; the first round only warms up."""
    requests = max(batch, arguments.requests // batch * batch)
    case = Case(temperature, batch, requests, arguments.tokens)
    warm = Case(temperature, batch, batch, min(8, arguments.tokens))
    found: dict[str, list[Measured]] = {arm: [] for arm in pipes}
    for number in range(arguments.rounds + 1):
        for arm, pipe in pipes.items():
            pipe.send(case if number else warm)
            measured = pipe.recv()
            if number:
                found[arm].append(measured)
    rows = [
        Row(
            arm,
            temperature,
            batch,
            round(statistics.median(m.rate for m in results), 1),
            round(statistics.median(m.acceptance for m in results), 3),
            [round(m.rate, 1) for m in results],
        )
        for arm, results in found.items()
    ]
    for row in rows:
        print(json.dumps(asdict(row)), flush=True)
    return rows


def table(rows: list[Row]) -> str:
    """A Markdown table: a line a case, a column an arm; acceptance length in brackets."""
    arms = list(dict.fromkeys(row.arm for row in rows))
    cases = dict.fromkeys((row.temperature, row.batch) for row in rows)
    by_case = {(row.temperature, row.batch, row.arm): row for row in rows}
    lines = []
    for temperature, batch in cases:
        cells = [by_case[temperature, batch, arm] for arm in arms]
        shown = [f"{cell.tokens_per_second:.0f} ({cell.acceptance_length:.2f})" for cell in cells]
        lines.append([f"{temperature:g}", str(batch), *shown])
    return report.table(["temperature", "batch", *arms], lines)


def panels(rows: list[Row]) -> list[report.Panel]:
    """Tokens a second, and acceptance length, over the batch size; a pair a temperature."""
    found = []
    for temperature in dict.fromkeys(row.temperature for row in rows):
        rates: dict[str, list[tuple[float, float]]] = {}
        lengths: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.temperature == temperature:
                rates.setdefault(row.arm, []).append((row.batch, row.tokens_per_second))
                lengths.setdefault(row.arm, []).append((row.batch, row.acceptance_length))
        title = f"temperature {temperature:g}"
        found.append(report.Panel(title, "batch size", "tokens a second", rates, "xy"))
        found.append(report.Panel(title, "batch size", "mean acceptance length", lengths, "x"))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("pair", type=Path)
    parser.add_argument("--arms", nargs="+", default=["none", "chain:5", "tree:31"])
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.6, 1.0])
    parser.add_argument("--tokens", type=int, default=128, help="tokens a request")
    parser.add_argument("--requests", type=int, default=12, help="requests a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=2048)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the files."""
    report.require_plotting(arguments.plot)
    rows = compare(arguments)
    print(table(rows), flush=True)
    if arguments.json:
        report.write_json(arguments.json, [asdict(row) for row in rows])
    if arguments.plot:
        report.plot(arguments.plot, panels(rows))
    return 0

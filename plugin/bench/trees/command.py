"""Tokens per second of the tree beside stock vLLM: no speculation, and chains of several lengths.

    vllm-graft bench trees PAIR --arms none sampled:3,5,7 auto:63 --batch 1 4 16 64

PAIR holds `target/`, `eagle3/` and `prompts.json`, as `tests/pair` does. With another `--method`
the draft's folder has its name; an MTP module is in `target/`. All arms are up at the same time,
each in a process of its own with its share of the GPU's memory, and take turns at every temperature
and batch size, `--rounds` times; the table has the medians. An arm is

- `none`, no speculation;
- `chain:K`, stock vLLM with K drafts, the likeliest; `sampled:K`, stock vLLM with K sampled
  drafts; `block:K`, with sampled drafts that are verified as a block; `adaptive:K`, like that and
  with vLLM's adaptive verification. `chain:3,5,7` is one engine that is told each length in turn;
- `tree:N`, N nodes (`--topk`, `--steps`), or `tree:N@RANGES` with the number of nodes by batch size
  in vLLM's own form, `tree:31@[[1,1,31],[2,8,15]]`;
- `auto:N`, `shape: auto` with up to N nodes, `--topk` and `--auto-steps`.

`+fp8` behind a name asks for a draft in FP8, `+fp8head` behind a tree for its output head alone in
FP8, `+ngram` behind a tree for n-grams of the requests' texts beside the draft's tokens
(`graft.tree.ngram`), `+hot` behind a tree for `hot_tokens` 8192, `+window2048` for a draft that
sees a window of so many tokens (`graft.tree.draft_window`), `+states` for recurrent layers that
leave states (`graft.tree.recurrent_form`). `+pdl` behind any name lets kernels that PyTorch's
compiler writes begin before the ones before them have ended (programmatic dependent launch).
`--fp8-target` puts the target and the K/V of all arms into FP8.

`--answers N` first compares N greedy answers of each arm with those of the first, and says how near
to a tie the first arm was where another differs.

As many requests as the batch are in flight all the time: when one ends, the next begins. Prompts
and seeds are the same in every arm.

With `shape: auto`, the printed lines and the JSON file have, for each number of nodes, its share of
the last round's steps, its tokens and milliseconds, and what the tuner expects of it.

A second table says how long a step takes, how many tokens one pass over the target's weights yields
for all requests together, and which share of the memory's bandwidth a step uses: the time in which
what must be read once (the weights of target and draft, and the K/V in flight) could be copied,
over the step's time. It is left out for targets with experts, as each step reads other ones.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_graft.base import markdown
from vllm_graft.bench.common import report
from vllm_graft.bench.common.answers import Answer
from vllm_graft.bench.common.answers import compare as compare_answers
from vllm_graft.bench.common.closed_loop import (
    Ask,
    Call,
    Case,
    ClosedLoop,
    Measured,
    TooFewRequests,
)
from vllm_graft.bench.common.engine_arms import METHODS, Arm, draft_folder, is_ours, read_arm
from vllm_graft.bench.common.node_counts import Nodes
from vllm_graft.bench.common.step_bytes import StepBytes, step_bytes, step_cell

SUMMARY = "tokens per second of the tree, of chains and without speculation"


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


@contextmanager
def running(target: Path, options: dict[str, Any]) -> Iterator[Any]:
    """Run an engine on the GPU where there is one, else in this process by the interpreter."""
    import torch

    from vllm_graft import testing

    # Each request pays for its prompt, unless `--options` say otherwise.
    options.setdefault("enable_prefix_caching", False)
    if torch.cuda.is_available():
        # The engine is ended in order, because a spawned process waits for its children before it
        # runs its exit handlers.
        engine = testing.running(target, disable_log_stats=False, **options)
    else:
        options.pop("gpu_memory_utilization")
        engine = testing.cpu_engine(target, **options)
    with engine as llm:
        yield llm


def serve(pipe: Connection, target: Path, options: dict[str, Any], prompts: list[str]) -> None:
    """Run an arm's process: start the engine, then answer every `Case` with a `Measured`.

    An `Ask` is answered with answers, a `Call` with the result of the worker's function. A case
    that the engine can't hold is answered with why, a text.
    """
    # Functions such as `fix_drafts` are pickled for the engine's process. That process is spawned:
    # asking whether there is a GPU, as below, already starts CUDA, which does not survive a fork.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    with running(target, options) as llm:
        loop = ClosedLoop(llm, prompts)
        pipe.send("ready")
        while (wish := pipe.recv()) is not None:
            if isinstance(wish, Call):
                pipe.send(llm.collective_rpc(wish.function, args=wish.arguments)[0])
            else:
                pipe.send(loop.answers(wish) if isinstance(wish, Ask) else _measured(loop, wish))


def _measured(loop: ClosedLoop, case: Case) -> Measured | str:
    try:
        return loop.measure(case)
    except TooFewRequests as error:
        return str(error)


def compare(arguments: argparse.Namespace) -> list[Row]:
    """Start all arms, let them take turns, and return a row for each column and case."""
    prompts = read_prompts(arguments.pair, arguments.prompt)
    pipes = start(read_arms(arguments), arguments, prompts)
    if arguments.answers:
        check_answers(pipes, arguments)
    needed = {}
    for arm, pipe in pipes.items():
        pipe.send(Call(step_bytes))
        needed[arm] = pipe.recv()
    rows = [
        row
        for temperature in arguments.temperature
        for batch in arguments.batch
        for row in take_turns(pipes, arguments, temperature, batch, needed)
    ]
    for pipe in pipes.values():
        pipe.send(None)
    return rows


def read_prompts(pair: Path, characters: int) -> list[str]:
    """The pair's prompts, cut to so many characters."""
    texts: list[str] = json.loads((pair / "prompts.json").read_text())
    return [text[:characters] for text in texts]


def read_arms(arguments: argparse.Namespace) -> list[Arm]:
    """The arms that the arguments name."""
    draft = draft_folder(arguments.pair, arguments.method)
    arms = []
    for name in arguments.arms:
        steps = arguments.auto_steps if name.startswith("auto:") else arguments.steps
        largest = max(arguments.batch)
        arms.append(read_arm(name, draft, arguments.topk, steps, largest, arguments.method))
    return arms


def with_options(own: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """An arm's own options of ``vllm.LLM``, and those that all arms are given."""
    found = {**more, **own}
    for key in ("additional_config", "compilation_config"):
        if key in more:
            found[key] = more[key] | own.get(key, {})
    return found


def engine_options(arm: Arm, arguments: argparse.Namespace, engines: int) -> dict[str, Any]:
    """The options of ``vllm.LLM`` for an arm that shares the GPU with other engines."""
    options = with_options(arm.options, arguments.options)
    options["max_model_len"] = arguments.max_model_len
    options["max_num_seqs"] = max(arguments.batch)
    options["gpu_memory_utilization"] = 0.9 / engines
    if arguments.kv_cache_bytes:
        options["kv_cache_memory_bytes"] = arguments.kv_cache_bytes
    if arguments.fp8_target:
        options |= {"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8"}
    if arguments.sizes:
        compilation = options.get("compilation_config", {})
        options["compilation_config"] = compilation | {"cudagraph_capture_sizes": arguments.sizes}
    return options


def start(
    arms: list[Arm], arguments: argparse.Namespace, prompts: list[str]
) -> dict[Arm, Connection]:
    """Start the engines one after another, because vLLM measures how much memory is left.

    With `--kv-cache-bytes` it need not, and they start together.

    Raises:
        BenchmarkError: an engine did not start.
    """
    context = multiprocessing.get_context("spawn")
    target, pipes = arguments.pair / "target", {}
    for arm in arms:
        options = engine_options(arm, arguments, len(arms))
        pipes[arm], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, target, options, prompts), daemon=False).start()
        theirs.close()
        if not arguments.kv_cache_bytes:
            wait(arm, pipes[arm])
    if arguments.kv_cache_bytes:
        for arm, pipe in pipes.items():
            wait(arm, pipe)
    return pipes


def wait(arm: Arm, pipe: Connection) -> None:
    """Wait until the engine of an arm is up."""
    began = time.perf_counter()
    try:
        pipe.recv()
    except EOFError:
        raise report.BenchmarkError(
            f"arm {arm.name}: its engine did not start; its log is above"
        ) from None
    print(f"{arm.name}: ready after {time.perf_counter() - began:.0f} s", flush=True)


def check_answers(pipes: dict[Arm, Connection], arguments: argparse.Namespace) -> None:
    """Print how many greedy answers, among arriving prompts, equal those of the first arm."""
    case = Case(0.0, max(1, arguments.answers // 4), arguments.answers, arguments.tokens)
    found: dict[str, list[Answer]] = {}
    for arm, pipe in pipes.items():
        pipe.send(Ask(case, margins=not found))
        found[arm.name] = pipe.recv()
    for comparison in compare_answers(found):
        print(comparison, flush=True)


def take_turns(
    pipes: dict[Arm, Connection],
    arguments: argparse.Namespace,
    temperature: float,
    batch: int,
    needed: Mapping[Arm, StepBytes] | None = None,
) -> list[Row]:
    """Measure one case on every column in turn; the first round only warms up.

    `needed` is what a step of each arm must read; without it no bandwidth is computed. A column
    that can't hold the case is told, and has no row.
    """
    requests = max(arguments.requests, 3 * batch)
    case = Case(temperature, batch, requests, arguments.tokens)
    warm = replace(case, requests=batch + max(1, batch // 2))
    turns = [
        (column, pipe, drafts)
        for arm, pipe in pipes.items()
        for column, drafts in arm.columns.items()
    ]
    found: dict[str, list[Measured]] = {column: [] for column, _, _ in turns}
    of_column = {column: arm for arm in pipes for column in arm.columns}
    for number in range(arguments.rounds + 1):
        for column, pipe, drafts in turns:
            if column not in found:
                continue
            pipe.send(replace(case if number else warm, drafts=drafts))
            measured = pipe.recv()
            if isinstance(measured, str):
                del found[column]
                print(f"{column} is left out at {batch} in flight: {measured}", flush=True)
            elif number:
                found[column].append(measured)
    rows = [
        make_row(column, temperature, batch, results, (needed or {}).get(of_column[column]))
        for column, results in found.items()
    ]
    for row in rows:
        print(json.dumps(asdict(row)), flush=True)
    return rows


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("pair", type=Path)
    parser.add_argument("--method", choices=METHODS, default="eagle3", help="of the draft")
    parser.add_argument("--arms", nargs="+", default=["none", "chain:5", "tree:31"])
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--auto-steps", type=int, default=12)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.6, 1.0])
    parser.add_argument("--tokens", type=int, default=128, help="tokens per request")
    parser.add_argument("--prompt", type=int, default=400, help="characters of a prompt")
    parser.add_argument(
        "--requests", type=int, default=12, help="requests a measurement, 3 batches at least"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--answers",
        type=int,
        default=0,
        help="compare so many greedy answers with the first arm's before",
    )
    parser.add_argument("--fp8-target", action="store_true", help="FP8 target and K/V in all arms")
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        metavar="JSON",
        help="more options of vllm.LLM for all arms, "
        """'{"additional_config": {"gdn_prefill_backend": "triton"}}' for example""",
    )
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--sizes", nargs="+", type=int, help="cudagraph_capture_sizes of all arms")
    parser.add_argument(
        "--kv-cache-bytes", type=int, help="of each engine; they start together then"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the files."""
    report.require_plotting(arguments.plot)
    rows = compare(arguments)
    print(table(rows), flush=True)
    print("a step's time, tokens per read of the target's weights, bandwidth used:")
    print(step_table(rows), flush=True)
    if arguments.json:
        report.write_json(arguments.json, [asdict(row) for row in rows])
    if arguments.plot:
        report.plot(arguments.plot, panels(rows))
    return 0

"""Tokens per second of the tree beside stock vLLM: no speculation, and chains of several lengths.

    vllm-graft bench trees PAIR --arms none sampled:3,5,7 auto:63 --batch 1 4 16 64

PAIR holds `target/`, `eagle3/` and `prompts.json`, as `tests/pair` does. With another `--method`
the draft's folder has its name; an MTP module is in `target/`. All arms are up at the same time,
each in a process of its own with its share of the GPU's memory, and take turns at every temperature
and batch size, `--rounds` times; the table has the medians. An arm is

- `none`, no speculation;
- `graft`, the preset `auto` without a draft model, which grows trees of n-grams; `graft+memory`,
  the same with `graft.tree.memory`;
- `chain:K`, stock vLLM with K drafts, the likeliest; `sampled:K`, stock vLLM with K sampled
  drafts; `block:K`, with sampled drafts that are verified as a block; `adaptive:K`, like that and
  with vLLM's adaptive verification. `chain:3,5,7` is one engine that is told each length in turn;
- `ngram:K`, stock vLLM with K drafts of n-grams (`method: ngram_gpu`), which needs no draft model;
- `tree:N`, N nodes (`--topk`, `--steps`), or `tree:N@RANGES` with the number of nodes by batch size
  in vLLM's own form, `tree:31@[[1,1,31],[2,8,15]]`;
- `auto:N`, `shape: auto` with up to N nodes, `--topk` and `--auto-steps`.

`+fp8` behind a name asks for a draft in FP8, `+pdl` for kernels of PyTorch's compiler that begin
before the ones before them have ended (programmatic dependent launch). Behind a tree, `+fp8head`
asks for its output head alone in FP8, `+ngram` for `graft.tree.ngram`, `+memory` for this and
`graft.tree.memory`, `+hot8192` for `graft.tree.hot_tokens`, `+window2048` for
`graft.tree.draft_window`, and `+states` for `graft.tree.recurrent_form`. `--fp8-target` puts the
target and the K/V of all arms into FP8.

`--answers N` first compares N greedy answers of each arm with those of the first, and says how near
to a tie the first arm was where another differs.

As many requests as the batch are in flight all the time. Prompts and seeds are the same in every
arm, round and case. With `--new-prompts` each round goes on with the prompts behind those of the
round before, so that nothing learns from an answer that comes again (`hot_tokens` and n-grams do).

With `shape: auto`, the printed lines and the JSON file have, for each number of nodes, its share of
the last round's steps, its tokens and milliseconds, and what the tuner expects of it.

A second table has a step's time, the tokens of all requests per pass over the target's weights,
and the share of the memory's bandwidth that a step uses: the time in which what must be read once
(weights and K/V in flight) could be copied, over the step's. Targets with experts have no share.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_graft.bench.common import arm_processes, report
from vllm_graft.bench.common.answers import Answer
from vllm_graft.bench.common.answers import compare as compare_answers
from vllm_graft.bench.common.arm import Arm, Row, median_row, panels, table, write_files
from vllm_graft.bench.common.closed_loop import Ask, Call, Case, ClosedLoop, Measured
from vllm_graft.bench.common.step_bytes import StepBytes, step_bytes, step_cell
from vllm_graft.bench.trees.arm_names import METHODS, draft_folder, read_arm

_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Options that part the workers from the scheduler, whose table of lengths `fix_drafts` sets."""

SUMMARY = "tokens per second of the tree, of chains and without speculation"


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
    rows = measure_cases(pipes, arguments, needed)
    arm_processes.stop(pipes)
    return rows


def read_prompts(pair: Path, characters: int) -> list[str]:
    """The pair's prompts, cut to so many characters."""
    texts: list[str] = json.loads((pair / "prompts.json").read_text())
    return [text[:characters] for text in texts]


def read_arms(arguments: argparse.Namespace) -> list[Arm]:
    """The arms that the arguments name.

    Raises:
        BenchmarkError: an arm can't be read, or can't be told lengths with these options.
    """
    draft = draft_folder(arguments.pair, arguments.method)
    arms = []
    for name in arguments.arms:
        steps = arguments.auto_steps if name.startswith("auto:") else arguments.steps
        largest = max(arguments.batch)
        arms.append(read_arm(name, draft, arguments.topk, steps, largest, arguments.method))
    apart = {key: arguments.options[key] for key in _RANKS if arguments.options.get(key, 1) != 1}
    for arm in arms:
        if arm.drafts and apart:
            raise report.BenchmarkError(
                f"--arms {arm.name!r}: an engine of several ranks can't be told lengths in turn "
                f"(--options has {json.dumps(apart)}): give each length an arm of its own, as "
                f"{' '.join(arm.columns)}"
            )
    return arms


def engine_options(arm: Arm, arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of ``vllm.LLM`` for an arm."""
    options = arm_processes.with_options(arm.options, arguments.options)
    options["max_model_len"] = arguments.max_model_len
    options["max_num_seqs"] = max(arguments.batch)
    if arguments.fp8_target:
        options |= {"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8"}
    if arguments.sizes:
        compilation = options.get("compilation_config", {})
        options["compilation_config"] = compilation | {"cudagraph_capture_sizes": arguments.sizes}
    return options


def start(
    arms: list[Arm], arguments: argparse.Namespace, prompts: list[str]
) -> dict[Arm, Connection]:
    """Start the engines of arms; each answers a `Case`, an `Ask` or a `Call`."""
    options = {arm: engine_options(arm, arguments) for arm in arms}
    loop = partial(ClosedLoop, prompts=prompts)
    return arm_processes.start(options, arguments.pair / "target", loop, arguments.kv_cache_bytes)


def check_answers(pipes: dict[Arm, Connection], arguments: argparse.Namespace) -> None:
    """Print how many greedy answers, among arriving prompts, equal those of the first arm."""
    case = Case(0.0, max(1, arguments.answers // 4), arguments.answers, arguments.tokens)
    found: dict[str, list[Answer]] = {}
    for arm, pipe in pipes.items():
        pipe.send(Ask(case, margins=not found))
        found[arm.name] = pipe.recv()
    for comparison in compare_answers(found):
        print(comparison, flush=True)


def measure_cases(
    pipes: dict[Arm, Connection],
    arguments: argparse.Namespace,
    needed: Mapping[Arm, StepBytes] | None = None,
) -> list[Row]:
    """Measure all temperatures and batch sizes; see `take_turns`."""
    rows: list[Row] = []
    first = 0 if arguments.new_prompts else None
    for temperature in arguments.temperature:
        for batch in arguments.batch:
            rows += take_turns(pipes, arguments, temperature, batch, needed, first)
            if first is not None:
                first += sum(case.requests for case in rounds(arguments, temperature, batch))
    return rows


def rounds(
    arguments: argparse.Namespace, temperature: float, batch: int, first: int | None = None
) -> list[Case]:
    """The load of each round; the first round only warms up.

    With `first`, the number of the first request, each goes on where the one before ended.
    """
    requests = max(arguments.requests, 3 * batch)
    case = Case(temperature, batch, requests, arguments.tokens)
    cases = [replace(case, requests=batch + max(1, batch // 2)), *[case] * arguments.rounds]
    if first is None:
        return cases
    starts = accumulate((each.requests for each in cases), initial=first)
    return [replace(each, first=start) for each, start in zip(cases, starts)]


def take_turns(
    pipes: dict[Arm, Connection],
    arguments: argparse.Namespace,
    temperature: float,
    batch: int,
    needed: Mapping[Arm, StepBytes] | None = None,
    first: int | None = None,
) -> list[Row]:
    """Measure one case on every column in turn; see `rounds` for `first`.

    `needed` is what a step of each arm must read. A column that can't hold the case has no row.
    """
    turns = [(arm, column, drafts) for arm in pipes for column, drafts in arm.columns.items()]
    found: dict[str, list[Measured]] = {column: [] for _, column, _ in turns}
    for number, case in enumerate(rounds(arguments, temperature, batch, first)):
        for arm, column, drafts in turns:
            if column not in found:
                continue
            pipes[arm].send(replace(case, drafts=drafts))
            measured = pipes[arm].recv()
            if isinstance(measured, str):
                del found[column]
                print(f"{column} is left out at {batch} in flight: {measured}", flush=True)
            elif number:
                found[column].append(measured)
    asked = {"temperature": temperature, "batch": batch}
    rows = [
        _make_row(column, asked, found[column], (needed or {}).get(arm))
        for arm, column, _ in turns
        if column in found
    ]
    for row in rows:
        print(json.dumps(row.flat()), flush=True)
    return rows


def _make_row(
    column: str, case: dict[str, Any], results: list[Measured], needed: StepBytes | None
) -> Row:
    rounds = [
        {
            "tokens_per_second": measured.rate,
            "acceptance_length": measured.acceptance,
            "step_ms": measured.step * 1e3,
            "tokens_per_step": measured.rate * measured.step,
            "bandwidth_use": needed.use(measured.step, measured.held) if needed else None,
        }
        for measured in results
    ]
    return median_row(column, case, rounds, nodes=results[-1].nodes)


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
    parser.add_argument(
        "--new-prompts",
        action="store_true",
        help="each round asks for other prompts, as long as there are any",
    )
    parser.add_argument(
        "--answers",
        type=int,
        default=0,
        help="compare so many greedy answers with the first arm's before",
    )
    parser.add_argument("--fp8-target", action="store_true", help="FP8 target and K/V in all arms")
    arm_processes.add_engine_arguments(parser)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--sizes", nargs="+", type=int, help="cudagraph_capture_sizes of all arms")


def rate_cell(row: Row) -> str:
    """Tokens per second, and the acceptance length in brackets."""
    return f"{row.main[1]:.0f} ({row.figures['acceptance_length']:.2f})"


def time_cell(row: Row) -> str:
    """A step's time, tokens per pass over the target's weights, bandwidth used."""
    figures = row.figures
    return step_cell(
        figures["step_ms"] or 0.0, figures["tokens_per_step"] or 0.0, figures["bandwidth_use"]
    )


DRAWN = {"tokens_per_second": "tokens per second", "acceptance_length": "mean acceptance length"}
"""Figures of the plot, and the texts of their axes."""


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write the files."""
    rows = compare(arguments)
    print(table(rows, rate_cell), flush=True)
    print("a step's time, tokens per read of the target's weights, bandwidth used:")
    print(table(rows, time_cell, compare=False), flush=True)
    write_files(arguments, rows, panels(rows, "batch", DRAWN))
    return 0

"""Engines of arms, and their turns: one after another measures a case, or answers prompts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any

from vllm_graft.bench.common import arm_processes
from vllm_graft.bench.common.answers import Answer
from vllm_graft.bench.common.answers import compare as compare_answers
from vllm_graft.bench.common.arm import Arm, Row, median_row
from vllm_graft.bench.common.closed_loop import Ask, Case, ClosedLoop, Measured
from vllm_graft.bench.common.step_bytes import StepBytes


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
        make_row(column, asked, found[column], (needed or {}).get(arm))
        for arm, column, _ in turns
        if column in found
    ]
    for row in rows:
        print(json.dumps(row.flat()), flush=True)
    return rows


def make_row(
    column: str, case: dict[str, Any], results: list[Measured], needed: StepBytes | None
) -> Row:
    """Take the medians of a column's rounds; `nodes` are of its last round."""
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

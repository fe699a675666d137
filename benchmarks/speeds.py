"""Tokens per second of a pair's arms on workloads that people have.

    python -m benchmarks.speeds PAIR --workload edits agent --arms none ngram:5 graft --new-prompts
    python -m benchmarks.speeds PAIR --workload rollout --temperature 1 --arms graft graft+memory

PAIR is a folder as `tests/pair` is, whose own prompts are the workload `pair`; in `mixed` they run
at temperature 1 beside greedy edits, half and half. The others are those of
`python -m benchmarks.workloads`. All arms are up at the same time, and take turns as in
`vllm-graft bench trees`. Answers of edits, agents, retrieval and summaries are replayed
(`benchmarks.replay`), unless the target can follow instructions: `--own-answers`.

A rollout has `--prompts` of its own for each number of requests in flight, and a row for each
epoch, so that a memory of the first shows in the second.

With `--answers N` the first arm answers so many requests of each workload at its first temperature,
and it is said how often these answers repeat.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import pair_arms
from benchmarks.workloads.catalogue import WORKLOADS
from benchmarks.workloads.load import MIXED, OWN, Load, load_of
from benchmarks.workloads.repeats import Said, shares
from benchmarks.workloads.sources import EPOCHS
from vllm_graft.bench.common import arm_processes, report
from vllm_graft.bench.common.arm import Arm, Row, median_row, table
from vllm_graft.bench.common.closed_loop import Ask, Case
from vllm_graft.bench.common.report import TimeLimit, add_seconds
from vllm_graft.bench.trees import command

Pipes = Mapping[Arm, Connection]


def told(arguments: argparse.Namespace, name: str) -> argparse.Namespace:
    """The arguments with what a workload's requests add to them."""
    turns = WORKLOADS[name].turns if name in WORKLOADS else 1
    return argparse.Namespace(**vars(arguments) | {"turns": turns})


def count_of(arguments: argparse.Namespace, name: str) -> int:
    """The number of requests of a workload."""
    if name == "rollout":
        prompts, answers = int(arguments.prompts), int(arguments.answers_per_prompt)
        return EPOCHS * prompts * answers
    return command.most_requests(told(arguments, name))


def say_repeats(pipes: Pipes, case: Case, load: Load) -> str:
    """How often the first arm's answers repeat."""
    arm, pipe = next(iter(pipes.items()))
    pipe.send(Ask(case, margins=False))
    answers = arm_processes.answer(arm, pipe)
    asked = [each.prompt["prompt_token_ids"] for each in load.requests[case.first :]]
    return str(shares(Said(prompt, each.tokens) for prompt, each in zip(asked, answers)))


def measure_epochs(pipes: Pipes, arguments: argparse.Namespace, first: int) -> list[Row]:
    """Measure the epochs of a rollout that begins at a request, for each number in flight."""
    rows, temperature = list[Row](), arguments.temperature[0]
    batches = arguments.requests_in_flight
    size = arguments.prompts * arguments.answers_per_prompt // len(batches)
    for cell, batch in enumerate(batches):
        for epoch in range(EPOCHS):
            start = first + (epoch * len(batches) + cell) * size
            case = Case(temperature, batch, size, arguments.tokens, first=start)
            for arm, pipe in pipes.items():
                pipe.send(case)
                measured = arm_processes.answer(arm, pipe)
                if isinstance(measured, str):
                    raise report.BenchmarkError(f"{arm.name} at {batch} in flight: {measured}")
                asked = {"epoch": epoch + 1, "requests_in_flight": batch}
                rows.append(median_row(arm.name, asked, [measured.figures]))
    return rows


def run(arguments: argparse.Namespace) -> None:
    """Measure each workload, print its table, write all rows."""
    every, starts = Load(), dict[str, int]()
    for name in arguments.workload:
        count = count_of(arguments, name)
        starts[name] = len(every.requests)
        load = load_of(arguments, name, count)
        # The pair's own prompts begin again where they are too few.
        every.requests += islice(cycle(load.requests), max(count, len(load.requests)))
        every.answers |= load.answers
    pipes = pair_arms.start(pair_arms.read_arms(arguments), arguments, every)
    limit, rows = TimeLimit(arguments.seconds, len(starts)), list[dict[str, Any]]()
    for name, first in starts.items():
        if arguments.answers:
            batch = min(arguments.answers, max(arguments.requests_in_flight))
            case = Case(
                arguments.temperature[0], batch, arguments.answers, arguments.tokens, first=first
            )
            print(f"{name}: answers repeat {say_repeats(pipes, case, every)}", flush=True)
        if name == "rollout":
            found = measure_epochs(pipes, arguments, first)
        else:
            found = command.measure_cases(pipes, told(arguments, name), limit, first)
        print(f"{name}:\n{table(found, command.rate_cell)}", flush=True)
        rows += [{"workload": name, **row.flat()} for row in found]
        if arguments.json:
            report.write_json(arguments.json, rows, quiet=True)
    arm_processes.stop(pipes)


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pair_arms.add_pair_arguments(parser)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--arms", nargs="+", default=["none", "ngram:5", "graft"])
    names = [OWN, MIXED, *WORKLOADS]
    parser.add_argument("--workload", nargs="+", choices=names, default=["edits", OWN])
    command.add_loads(parser)
    parser.add_argument("--json", type=Path)
    add_seconds(parser)
    parser.set_defaults(requests_in_flight=[1, 16], tokens=256, max_model_len=4096)
    arguments = parser.parse_args(argv)
    arguments.prompts *= len(arguments.requests_in_flight)
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = read_arguments(argv)
    return report.exit_status("benchmarks.speeds", partial(run, arguments))


if __name__ == "__main__":
    raise SystemExit(main())

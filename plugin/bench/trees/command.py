"""Tokens per second of your model with trees, and of stock vLLM: without drafts, and its best ones.

    vllm-graft bench trees MODEL --dataset questions.jsonl --requests-in-flight 1 4 16 64 \\
        --speculative-config '{"method": "eagle3", "model": HEAD, "num_speculative_tokens": 5}'

Each load is warmed up, then measured `--rounds` times; the table has the medians. An arm is

- `none`, no speculation;
- `chain:K`, stock vLLM with K drafts of your draft model, the likeliest; `sampled:K`, with sampled
  drafts; `block:K`, with sampled drafts that are verified as a block; `adaptive:K`, like that and
  with vLLM's adaptive verification. `chain:2,3,5` is one engine that is told each length in turn;
- `ngram:K`, stock vLLM with K drafts of n-grams (`method: ngram_gpu`), which needs no draft model;
- `graft`, your flags, with `--additional-config.graft auto` if they ask for none of our parts.

More flags may follow in the same word: `--arms none 'graft --additional-config.graft.tree.topk 4'`.
Without `--arms` they are `none`, a chain of 2, 3, 5 and 7 (`block` if a temperature is not 0),
`ngram:5` and `graft`.

A line of `--dataset`'s JSONL file has a `prompt`, or `messages` and `tools`. It may bind the answer
to a `schema`, and limit its `output_tokens`. Requests of a `session` follow each other, as turns of
an agent do, and as many sessions are in flight as requests.

With `--url` a running server is measured instead, and nothing else: its own counters tell the
tokens. Tokens of other clients count as well.

As many requests as `--requests-in-flight` are in flight all the time. Prompts and seeds are the
same in every arm, round and load. With `--new-prompts` each round goes on with the prompts behind
those of the round before, so that nothing learns from an answer that comes again (`hot_tokens` and
n-grams do). Each request pays for its prompt, unless you say `--enable-prefix-caching`.

`--answers N` also compares N greedy answers of each arm with those of the first, and says how near
to a tie the first arm was where another differs.
"""

import argparse
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, product, repeat
from multiprocessing.connection import Connection
from typing import Any

from vllm_graft.base.errors import GraftError
from vllm_graft.bench.common import arm_processes
from vllm_graft.bench.common.answers import Answer
from vllm_graft.bench.common.answers import compare as compare_answers
from vllm_graft.bench.common.arm import Arm, Row, advice, median_row, panels, table, write_files
from vllm_graft.bench.common.closed_loop import Ask, Case, ClosedLoop, Measured
from vllm_graft.bench.common.report import BenchmarkError, TimeLimit, add_seconds, positive
from vllm_graft.bench.common.serve_flags import Serving, groups
from vllm_graft.bench.trees.arm_flags import read_arms
from vllm_graft.bench.trees.prompts import add_dataset, most_turns, read_prompts, require_dataset
from vllm_graft.bench.trees.running_server import RunningServer
from vllm_graft.metrics import server_info

SUMMARY = "tokens per second of your model with trees, with stock's drafts and with none"


def compare(arguments: argparse.Namespace, flags: list[str]) -> tuple[list[Row], dict[str, str]]:
    """Measure all arms; return a row for each column and case, and the columns' commands."""
    given = Serving.read(flags, preset=True)
    longest = given.config.model_config.max_model_len - arguments.tokens
    prompts = read_prompts(arguments, given.tokenizer, most_requests(arguments), longest)
    arms = read_arms(arguments.arms, given, sampled=any(arguments.temperature))
    held = max(len(each.prompt["prompt_token_ids"]) for each in prompts) + arguments.tokens
    parted = groups(arms, held * max(arguments.requests_in_flight))
    limit = TimeLimit(arguments.seconds, len(parted))
    rows: list[Row] = []
    answers: dict[str, list[Answer]] = {}
    for group in parted:
        pipes = arm_processes.start(group, given.model, partial(ClosedLoop, prompts=prompts))
        if arguments.answers:
            answers |= answers_of(pipes, arguments, margins=not answers)
        rows += measure_cases(pipes, arguments, limit)
        arm_processes.stop(pipes)
    print(*compare_answers(answers) if answers else (), sep="\n", flush=True)
    return rows, {column: text for arm in arms for column, text in arm.commands.items()}


def most_requests(arguments: argparse.Namespace) -> int:
    """The number of different prompts that the benchmark asks."""
    loads = product(arguments.temperature, arguments.requests_in_flight)
    asked = [[case.requests for case in rounds(arguments, *load)] for load in loads]
    return sum(map(sum, asked)) if arguments.new_prompts else max(map(max, asked))


def answers_of(
    pipes: Mapping[Arm, Connection], arguments: argparse.Namespace, margins: bool
) -> dict[str, list[Answer]]:
    """Greedy answers of each arm among arriving prompts; with `margins` those of the first arm."""
    case = Case(0.0, max(1, arguments.answers // 4), arguments.answers, arguments.tokens)
    found: dict[str, list[Answer]] = {}
    for arm, pipe in pipes.items():
        pipe.send(Ask(case, margins=margins and not found))
        found[arm.name] = arm_processes.answer(arm, pipe)
    return found


def measure_cases(
    pipes: Mapping[Arm, Any],
    arguments: argparse.Namespace,
    limit: TimeLimit | None = None,
    first: int = 0,
) -> list[Row]:
    """Measure all temperatures and numbers of requests in flight; see `take_turns`."""
    rows: list[Row] = []
    loads = [*product(arguments.temperature, arguments.requests_in_flight)]
    for temperature, batch in (limit or TimeLimit(None)).within(loads):
        rows += take_turns(pipes, arguments, temperature, batch, first)
        if arguments.new_prompts:
            first += sum(case.requests for case in rounds(arguments, temperature, batch))
    return rows


def rounds(
    arguments: argparse.Namespace, temperature: float, batch: int, first: int = 0
) -> list[Case]:
    """The load of each round, from a request on; the first round only warms up. With new prompts
    each goes on where the one before ended."""
    requests = max(arguments.requests, 3 * batch, arguments.turns * batch)
    # As many sessions as requests in flight have to be there, because their requests take turns.
    few = batch + max(1, batch // 2) if arguments.turns == 1 else requests
    numbers = [few, *[requests] * arguments.rounds]
    starts = accumulate(numbers, initial=first) if arguments.new_prompts else repeat(first)
    case = Case(temperature, batch, requests, arguments.tokens)
    return [replace(case, requests=each, first=start) for each, start in zip(numbers, starts)]


def take_turns(
    pipes: Mapping[Arm, Any],
    arguments: argparse.Namespace,
    temperature: float,
    batch: int,
    first: int = 0,
) -> list[Row]:
    """Measure a case on each column that can hold it, in turn; `first` is that of `rounds`."""
    turns = [(arm, column, drafts) for arm in pipes for column, drafts in arm.columns.items()]
    found: dict[str, list[Measured]] = {column: [] for _, column, _ in turns}
    for number, case in enumerate(rounds(arguments, temperature, batch, first)):
        for arm, column, drafts in turns:
            if column not in found:
                continue
            pipes[arm].send(replace(case, drafts=drafts))
            measured = arm_processes.answer(arm, pipes[arm])
            if isinstance(measured, str):
                del found[column]
                print(f"{column} is left out at {batch} in flight: {measured}", flush=True)
            elif number:
                found[column].append(measured)
    asked = {"temperature": temperature, "requests_in_flight": batch}
    rows = [
        median_row(column, asked, [measured.figures for measured in found[column]])
        for _, column, _ in turns
        if column in found
    ]
    for row in rows:
        said = f"{row.arm}: {rate_cell(row)} tokens per second"
        print(f"temperature {temperature:g}, {batch} in flight, {said}", flush=True)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark; those of `vllm serve` are read apart."""
    add_dataset(parser)
    parser.add_argument("--url", help="measure the server at this address, and start none")
    parser.add_argument(
        "--arms", nargs="+", metavar="ARM", help="(default: stock's best, and graft)"
    )
    add_loads(parser)
    add_seconds(parser)


def add_loads(parser: argparse.ArgumentParser) -> None:
    """Add what is measured, for each arm alike."""
    told = "several are several measurements (default: %(default)s)"
    parser.add_argument(
        "--requests-in-flight", nargs="+", type=positive, default=[1, 4, 16], metavar="N", help=told
    )
    parser.add_argument(
        "--temperature", nargs="+", type=float, default=[0.0], metavar="T", help=told
    )
    parser.add_argument(
        "--rounds", type=positive, default=3, help="measurements of a load that count"
    )
    parser.add_argument("--tokens", type=positive, default=128, help="tokens per request at most")
    told = "requests a measurement, 3 times those in flight at least, or as many sessions"
    parser.add_argument("--requests", type=positive, default=12, help=told)
    parser.set_defaults(turns=1)
    told = "each round asks for other prompts, as long as there are any"
    parser.add_argument("--new-prompts", action="store_true", help=told)
    told = "compare so many greedy answers with the first arm's"
    parser.add_argument("--answers", type=int, default=0, metavar="N", help=told)


def rate_cell(row: Row) -> str:
    """Tokens per second, and the acceptance length in brackets."""
    return f"{row.main[1]:.0f} ({row.figures['acceptance_length']:.2f})"


DRAWN = {"tokens_per_second": "tokens per second", "acceptance_length": "mean acceptance length"}
"""Figures of the plot, and the texts of their axes."""


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    """Measure, print the tables, write the files; the last line is the command to use."""
    arguments.turns = most_turns(require_dataset(arguments.dataset, arguments.dataset_path))
    if arguments.url:
        return _run_url(arguments, flags)
    rows, commands = compare(arguments, flags)
    print(table(rows, rate_cell), flush=True)
    write_files(arguments, rows, panels(rows, "requests_in_flight", DRAWN), commands)
    print(advice(rows, commands))
    return 0


def _run_url(arguments: argparse.Namespace, flags: list[str]) -> int:
    """Measure a running server: what it runs is known to it alone."""
    if flags[1:] or arguments.arms or arguments.answers:
        given = " ".join(flags[1:]) or ("--arms" if arguments.arms else "--answers")
        raise BenchmarkError(f"--url: {given} is for engines that are started here: leave it away.")
    server = RunningServer(arguments.url)
    tokenizer = server.tokenizer(flags[0] if flags else None)
    longest = server.longest - arguments.tokens
    server.prompts = read_prompts(arguments, tokenizer, most_requests(arguments), longest)
    limit = TimeLimit(arguments.seconds)
    rows = measure_cases({Arm("server"): server}, arguments, limit)
    print(table(rows, rate_cell, compare=False), flush=True)
    write_files(arguments, rows, panels(rows, "requests_in_flight", DRAWN))
    with contextlib.suppress(GraftError):  # Stock vLLM has nothing of ours to tell.
        print(*server_info.sentences(server_info.ask(arguments.url)), sep="", end="")
    print("tokens per second, and tokens per step in brackets; without --url, stock is compared")
    return 0

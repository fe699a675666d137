"""Tokens per second where requests repeat what other requests said: rollouts and agents.

    python -m benchmarks.memory PAIR --arms none ngram:5 graft graft+memory \
        auto:63+fp8+ngram auto:63+fp8+memory --requests-in-flight 1 16 64

PAIR is a folder as for `benchmarks.pair_arms`, whose arms these are; `+memory` is
`graft.tree.memory` with n-grams. All are up at the same time and take turns at each epoch of each
batch size, which has prompts of its own, so that no arm remembers another cell.

- `rollout`: `--answers-per-prompt` answers of the target to each of `--prompts` prompts at the
  first of `--temperature`, and the same with other seeds in a second epoch, as in reinforcement
  learning;
- `agent`: sessions edit the same files one after another. A request is the session's transcript so
  far, the beginning of a file and the instruction to write all of it after an edit; from the second
  turn on another session has written it before. A small target can't follow instructions, so that
  answers are *replayed*: see `benchmarks.edits`. An epoch is a turn of all sessions.

`repeats` is the part of an answer's tokens whose five tokens before have come before them in the
request's own text, and in other requests' answers (for a rollout, that of the first arm's answers
is not known: it is left out).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import pair_arms
from benchmarks.edits import Edit, answers_to, edits, engines, make_parser, run, tokenizer_of
from vllm_graft.bench.common import arm_processes, report
from vllm_graft.bench.common.arm import Row, median_row
from vllm_graft.bench.common.closed_loop import Case

WORKLOADS = ("rollout", "agent")
_CONTEXT = 5
"""Tokens before a token that tell whether it repeats something."""


@dataclass
class Load:
    """The requests of a workload: cell by cell, and in each epoch by epoch.

    Attributes:
        epochs: requests of each epoch of a cell, by number in `prompts`.
        answers: the answers to replay, of each prompt.
    """

    prompts: list[str] = field(default_factory=list)
    epochs: list[list[range]] = field(default_factory=list)
    answers: list[Edit] = field(default_factory=list)


def rollouts(prompts: Sequence[str], cells: int, count: int, answers: int, epochs: int) -> Load:
    """The same prompts in each epoch, each so many times in a row."""
    if len(prompts) < cells * count:
        raise report.BenchmarkError(
            f"the pair has {len(prompts)} prompts, and {cells} cells want {count} each"
        )
    load = Load([each for each in prompts[: cells * count] for _ in range(answers)])
    size, all_of_them = count * answers, len(load.prompts)
    for cell in range(cells):
        # A number behind the last prompt's begins again, with other seeds.
        starts = [cell * size + epoch * all_of_them for epoch in range(epochs)]
        load.epochs.append([range(start, start + size) for start in starts])
    return load


def agents(cells: int, sessions: int, turns: int, characters: int, kept: int) -> Load:
    """Sessions that edit the files of their cell in turn, each beginning with another one.

    A prompt has the last `kept` characters of its session's transcript.
    """
    load, files = Load(), edits(cells * sessions, characters)
    for cell in range(cells):
        mine = files[cell * sessions : (cell + 1) * sessions]
        transcripts, numbers = [""] * sessions, []
        for turn in range(turns):
            first = len(load.prompts)
            for session in range(sessions):
                edit = mine[(session + turn) % sessions]
                shown, _, ask = edit.prompt.rpartition("\n# The same code")
                told = f"\n# Tool: the first lines of file {session + turn}\n"
                told += f"{shown[: characters // 4]}\n# All of it{ask}"
                asked = f"# Session {cell}.{session}\n{transcripts[session][-kept:]}{told}"
                load.prompts.append(asked)
                load.answers.append(Edit(asked, edit.answer))
                transcripts[session] += told + edit.answer
            numbers.append(range(first, len(load.prompts)))
        load.epochs.append(numbers)
    return load


def repeats(
    asked: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> tuple[float, float]:
    """Parts of the answers' tokens that repeat their own text, and the answers before."""
    others: set[tuple[int, ...]] = set()
    own = theirs = total = 0
    for prompt, answer in zip(asked, answers, strict=True):
        text = [*prompt, *answer]
        grams = list(zip(*(text[k:] for k in range(_CONTEXT + 1))))
        behind = max(0, len(prompt) - _CONTEXT)
        seen = set(grams[:behind])
        for gram in grams[behind:]:
            own, theirs = own + (gram in seen), theirs + (gram in others)
            seen.add(gram)
        others.update(grams[behind:])
        total += len(answer)
    return own / max(1, total), theirs / max(1, total)


def load_of(arguments: argparse.Namespace, workload: str) -> Load:
    cells = len(arguments.requests_in_flight)
    if workload == "agent":
        return agents(
            cells, arguments.sessions, arguments.turns, arguments.file, arguments.transcript
        )
    prompts = pair_arms.read_prompts(arguments.pair, arguments.prompt)
    return rollouts(prompts, cells, arguments.prompts, arguments.answers_per_prompt, 2)


def measure(arguments: argparse.Namespace, workload: str) -> list[Row]:
    """Measure all arms on one workload."""
    load = load_of(arguments, workload)
    answers: dict[tuple[int, ...], list[int]] = {}
    if load.answers:
        answers = answers_to(load.answers, tokenizer_of(arguments.pair))
        own, others = repeats([*answers], [*answers.values()])
        print(f"{workload}: repeats {own:.0%} of its own text, {others:.0%} of others'", flush=True)
    rows: list[Row] = []
    with engines(arguments, load.prompts, answers) as pipes:
        for batch, epochs in zip(arguments.requests_in_flight, load.epochs, strict=True):
            for number, epoch in enumerate(epochs, start=1):
                case = Case(
                    arguments.temperature[0],
                    batch,
                    len(epoch),
                    arguments.tokens,
                    first=epoch.start,
                )
                for arm, pipe in pipes.items():
                    pipe.send(case)
                    measured = arm_processes.answer(arm, pipe)
                    if isinstance(measured, str):
                        raise report.BenchmarkError(f"{arm.name} at {batch} in flight: {measured}")
                    asked = {"epoch": number, "batch": batch}
                    row = median_row(arm.name, asked, [measured.figures], nodes=measured.nodes)
                    rows.append(row)
                    print(json.dumps({"workload": workload, **row.flat()}), flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, WORKLOADS)
    parser.add_argument("--prompts", type=int, default=8, help="of a rollout, per batch size")
    parser.add_argument("--answers-per-prompt", type=int, default=16)
    parser.add_argument("--sessions", type=int, default=0, help="0: three times the largest batch")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--file", type=int, default=1500, help="characters of an agent's file")
    parser.add_argument("--transcript", type=int, default=3000, help="characters that are kept")
    parser.set_defaults(
        arms=["none", "ngram:5", "graft", "graft+memory"], requests_in_flight=[1, 16],
        temperature=[1.0], max_model_len=4096, tokens=256,
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    arguments.sessions = arguments.sessions or 3 * max(arguments.requests_in_flight)
    if arguments.prompts * arguments.answers_per_prompt < 3 * max(arguments.requests_in_flight):
        parser.error(
            "--prompts times --answers-per-prompt must be three times --requests-in-flight"
        )
    return run(arguments, measure)


if __name__ == "__main__":
    raise SystemExit(main())

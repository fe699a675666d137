"""Send random requests to real `vllm serve` processes, with our parts and without, on a CPU.

    python -m benchmarks.fuzz.server --requests 1000 --seed 7 --arm tree auto host-async
    python -m benchmarks.fuzz.server --requests 1000 --seed 7 --arm tree --only 17 230

One server without our parts answers all requests of a seed; then each arm does, and its answers are
compared: tokens, texts, logprobs, finish reasons, usage, errors. Every difference is explained by a
rule that has a name (`compare.py`), or the exit status is 1 and `OUT/ARM.json` has it.
`--only` sends only the requests of these numbers. `--corrupt 100` alters about one answered token
in a hundred of each arm: the run must fail.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.fuzz.answers import Answer, Raw, read
from benchmarks.fuzz.arms import ARMS, PLAIN, Arm, settings
from benchmarks.fuzz.client import send, send_all
from benchmarks.fuzz.compare import Gap, Judge, Verdict
from benchmarks.fuzz.requests import FuzzRequest, World, generate
from vllm_graft.testing.vllm_server import VLLM, ServerError, VllmServer

COMMAND = VLLM


@dataclass
class Result:
    """The result of an arm."""

    arm: str
    requests: int
    rules: Counter[str] = field(default_factory=Counter)
    failed: dict[int, Verdict] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Faults of the arm as a whole."""

    @property
    def ok(self) -> bool:
        return not self.failed and not self.broken


def compare_all(
    arm: Arm,
    judge: Judge,
    requests: Sequence[FuzzRequest],
    expected: Sequence[Answer],
    found: Sequence[Answer],
) -> Result:
    """Judge an arm's answers."""
    result = Result(arm.name, len(requests))
    for request, a, b in zip(requests, expected, found, strict=True):
        verdict = judge.compare(request, a, b)
        if verdict.rule is None:
            result.failed[request.number] = verdict
        else:
            result.rules[verdict.rule or "equal"] += 1
    return result


def gap_by(port: int) -> Gap:
    """Measure how near a token was to the reference's own: the reference gets the request again."""

    def gap(request: FuzzRequest, index: int, place: int, token: int) -> float | None:
        again = dataclasses.replace(request, body=witness(request), abort_after=None)
        answer = read(again, send(port, again))
        choice = answer.choices.get(index)
        if choice is None or choice.places is None or place >= len(choice.places):
            return None
        best = choice.places[place].top
        theirs, ours = choice.places[place].logprob, best.get(f"token_id:{token}")
        return None if ours is None or theirs is None else theirs - ours

    return gap


def witness(request: FuzzRequest) -> dict[str, object]:
    """Return a body that asks for the five best tokens of each place as well."""
    assert isinstance(request.body, dict)
    logprobs = {"logprobs": True, "top_logprobs": 5} if request.chat else {"logprobs": 5}
    dropped = ("stream", "stream_options", "echo", "prompt_logprobs")
    kept = {name: value for name, value in request.body.items() if name not in dropped}
    return {**kept, **logprobs, "return_tokens_as_token_ids": True}


def corrupted(answer: Answer, numbers: random.Random, one_in: int) -> bool:
    """Alter about one token in `one_in`; return whether any was altered."""
    altered = False
    for choice in answer.choices.values():
        for place in range(len(choice.tokens or ())):
            if numbers.randrange(one_in) == 0:
                assert choice.tokens is not None
                choice.tokens[place] ^= 1
                altered = True
    return altered


@contextlib.contextmanager
def serving(arm: Arm, folder: Path) -> Iterator[VllmServer]:
    """Start the server of an arm; it is not ready yet."""
    flags, environment = settings()
    folder.mkdir(parents=True, exist_ok=True)
    flags += arm.flags(folder)
    with VllmServer(flags, folder / "log", environment, COMMAND, report=say) as server:
        yield server


def answers(server: VllmServer, requests: Sequence[FuzzRequest], workers: int) -> list[Answer]:
    """Send requests to a server, and return its answers."""
    begin = time.monotonic()

    def told(count: int) -> None:
        if count % 100 == 0:
            say(f"  {count} of {len(requests)} after {time.monotonic() - begin:.0f} s")

    raws: list[Raw] = send_all(server.port, requests, workers, told)
    return [read(request, raw) for request, raw in zip(requests, raws)]


def state_of(server: VllmServer, arm: Arm) -> list[str]:
    """List what is wrong with a server that has answered."""
    try:
        metrics = server.metrics()
    except OSError as error:
        return [f"the server is gone ({error!r})"]
    return [f"{name} is 0" for name in arm.idle(metrics)]


def run_arm(
    arm: Arm,
    reference: VllmServer,
    requests: Sequence[FuzzRequest],
    expected: Sequence[Answer],
    options: argparse.Namespace,
) -> Result:
    """Start an arm's server, ask it, compare."""
    say(f"== {arm.name} ==")
    judge = Judge(gap_by(reference.port), arm.rules)
    with serving(arm, options.out / arm.name) as server:
        server.wait_ready(timeout=600, every=30)
        found = answers(server, requests, options.workers)
        broken = state_of(server, arm)
        numbers = random.Random(options.seed)
        if options.corrupt:
            altered = sum(corrupted(answer, numbers, options.corrupt) for answer in found)
            say(f"  {altered} answers were altered on purpose")
        result = compare_all(arm, judge, requests, expected, found)
    result.broken = broken
    report(result, requests, options.out)
    return result


def report(result: Result, requests: Sequence[FuzzRequest], out: Path) -> None:
    """Print what no rule explains, and write it to a file."""
    by_number = {request.number: request for request in requests}
    for number, verdict in result.failed.items():
        for difference in verdict.differences[:3]:
            say(f"  UNEXPLAINED {number} {by_number[number].kinds}: {difference}")
    for line in result.broken:
        say(f"  BROKEN: {line}")
    say("  " + ", ".join(f"{count} {rule}" for rule, count in result.rules.most_common()))
    told = {
        number: {
            "request": dataclasses.asdict(by_number[number]),
            "differences": [dataclasses.asdict(each) for each in verdict.differences],
        }
        for number, verdict in result.failed.items()
    }
    (out / f"{result.arm}.json").write_text(json.dumps(told, indent=1, default=repr))


def table(results: Sequence[Result]) -> str:
    """Lay out a line per arm."""
    rules = sorted({rule for result in results for rule in result.rules} - {"equal"})
    rows = [["arm", "requests", "equal", *rules, "unexplained", "broken"]]
    for result in results:
        counts = [result.requests, *(result.rules[rule] for rule in ("equal", *rules))]
        counts += [len(result.failed), len(result.broken)]
        rows.append([result.arm, *map(str, counts)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)) for row in rows)


def say(line: str) -> None:
    print(line, flush=True)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300, help="sent to each server")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--arm", nargs="+", choices=sorted(ARMS), default=["tree", "auto"])
    parser.add_argument("--workers", type=int, default=10, help="requests at a time")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of requests to send")
    parser.add_argument("--corrupt", type=int, default=0, help="alter one token in so many")
    parser.add_argument("--out", type=Path, help="folder for logs and differences")
    options = parser.parse_args(arguments)
    options.out = options.out or Path(tempfile.mkdtemp(prefix="vllm-graft-fuzz-"))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    requests = generate(options.seed, options.requests, World.of_pair())
    if options.only:
        requests = [request for request in requests if request.number in options.only]
    say(f"{len(requests)} requests of seed {options.seed}; logs: {options.out}")
    with serving(PLAIN, options.out / PLAIN.name) as reference:
        reference.wait_ready(timeout=600, every=30)
        expected = answers(reference, requests, options.workers)
        say(f"== {PLAIN.name}: {tally(expected)} ==")
        results = []
        for name in options.arm:
            try:
                results.append(run_arm(ARMS[name], reference, requests, expected, options))
            except ServerError as error:
                say(str(error))
                results.append(Result(name, 0, broken=[str(error)]))
    say(table(results))
    return 0 if all(result.ok for result in results) else 1


def tally(found: Sequence[Answer]) -> str:
    """Say how many answers there are of each status."""
    counts = Counter(answer.status for answer in found)
    return ", ".join(f"{count} of status {status}" for status, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())

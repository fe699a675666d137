"""Send random requests to real `vllm serve` processes, with our parts and without.

    python -m benchmarks.fuzz.server --requests 100 --seed 7 --arms tree weights --log all.jsonl
    python -m benchmarks.fuzz.server --requests 100 --seed 7 --arms tree --only 17 230

A server without our parts answers the requests of a seed. Then each arm does, some while they are
disturbed (`trouble.py`), some in several lives on one storage, and answers are compared: tokens,
texts, logprobs, finish reasons, usage, errors. Every difference is explained by a rule that has a
name (`compare.py`). Large requests follow, `--flood` of each kind; `growth.py` judges the time of
steps, memory, logs and threads. Each server's result is a line of JSON, which `--log` collects. If
anything is wrong the exit status is 1, and `OUT/ARM.json` has the differences. A GPU is used if
there is one; the arms `rich` need a CPU, `ranks` two GPUs, `replicas` two or a CPU. Runs with other
seeds are slices of a longer one. `--only` sends only the requests of these numbers. `--corrupt 100`
alters about one answered token in a hundred of each arm: the run must fail. `--kill 20` kills one
of an arm's ranks once 20 requests have ended: others have to end soon, with an error (`kill.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path

from benchmarks.fuzz import kill
from benchmarks.fuzz.answers import Answer, read
from benchmarks.fuzz.arms import ARMS, PLAIN, Arm, Life, settings
from benchmarks.fuzz.client import send, send_all
from benchmarks.fuzz.compare import Gap, Judge, Verdict
from benchmarks.fuzz.growth import Sizes, Watched, figures, judged
from benchmarks.fuzz.requests import FuzzRequest, World, flood, generate
from benchmarks.fuzz.targets import TARGETS
from benchmarks.fuzz.trouble import call, disturbing, reload
from benchmarks.fuzz.watch import FILE, plugin_path
from tests.support.engines.vllm_server import VLLM, ServerError, VllmServer

COMMAND = VLLM
WARM_UP = 2_000_000
"""Number of the first request of a warm-up, after which growth is measured."""


@dataclass
class Result:
    """The result of an arm's server, which is a slice of a longer run."""

    arm: str
    requests: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    failed: dict[int, Verdict] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Faults of the server as a whole."""
    figures: dict[str, float] = field(default_factory=dict)
    """Figures of the judges of `growth.py`."""
    troubles: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    """While requests were answered; starts of servers are not in it."""

    @property
    def ok(self) -> bool:
        return not self.failed and not self.broken

    def line(self, seed: int) -> str:
        """Return the slice's line of JSON."""
        told = {**vars(self), "seed": seed, "unexplained": len(self.failed)}
        told["per_minute"] = round(60 * self.requests / self.seconds, 1) if self.seconds else 0
        return json.dumps(told | {"failed": sorted(self.failed), "seconds": round(self.seconds)})


def compare_all(
    name: str,
    judge: Judge,
    requests: Sequence[FuzzRequest],
    expected: Sequence[Answer],
    found: Sequence[Answer],
) -> Result:
    """Judge the answers of an arm's server."""
    result = Result(name, len(requests))
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


@dataclass
class Slice:
    """The requests of a seed to one server, in three parts: warm-up, requests, flood."""

    warm_up: list[FuzzRequest]
    requests: list[FuzzRequest]
    flood: list[FuzzRequest]

    @classmethod
    def of(cls, options: argparse.Namespace, target: str) -> Slice:
        world = World.of_pair(**TARGETS[target].world)
        requests = generate(options.seed, options.requests, world)
        if options.only:
            return cls([], [each for each in requests if each.number in options.only], [])
        large = flood(options.seed, options.flood, world)
        first = generate(options.seed + 1, 12, world) if large else []
        first = [dataclasses.replace(each, number=WARM_UP + each.number) for each in first] + flood(
            options.seed, min(1, options.flood), world, WARM_UP + len(first)
        )
        return cls(first, requests, large)

    @property
    def compared(self) -> list[FuzzRequest]:
        return [*self.requests, *self.flood]

    def kinds(self, number: int) -> tuple[str, ...]:
        """Return the features of a request."""
        each = next((r for r in [*self.compared, *self.warm_up] if r.number == number), None)
        return each.kinds if each else ()


@dataclass
class Served:
    """A server that was started, its growth and its slow calls."""

    server: VllmServer
    steps: Path
    seen: Watched = field(default_factory=Watched)

    def measure(self) -> None:
        """Measure how large the server is."""
        self.seen.sizes.append(Sizes.of(self.server.group, self.server.log, self.steps))

    def ask(
        self, wanted: Slice, workers: int, troubles: tuple[str, ...] = (), seed: int = 0
    ) -> tuple[list[Answer], Counter[str]]:
        """Send a slice; return answers to its requests and its flood, and what disturbed them."""
        answers(self.server, wanted.warm_up, workers)
        self.measure()
        with disturbing(self.server.port, troubles, seed) as done:
            found = answers(self.server, wanted.requests, workers)
        self.measure()
        if wanted.flood:
            found += answers(self.server, wanted.flood, workers=2)
            self.measure()
        self.seen.asked, self.seen.flooded = len(wanted.requests), len(wanted.flood)
        self.seen.read(self.steps)
        return found, done


@contextlib.contextmanager
def serving(life: Life, folder: Path, out: Path) -> Iterator[Served]:
    """Start a server, and wait until it is ready."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("*.log")))
    common, environment = settings()
    flags = [*TARGETS[life.target].flags(out), *common[1:], *life.flags(folder)]
    steps = folder / f"{number}.steps"
    places = [str(plugin_path(out / "plugin")), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {FILE: str(steps), "PYTHONPATH": os.pathsep.join(places)}
    log = folder / f"{number}.log"
    with VllmServer(flags, log, environment, COMMAND, report=say) as server:
        server.wait_ready(timeout=900, every=30)
        yield Served(server, steps)


def answers(server: VllmServer, requests: Sequence[FuzzRequest], workers: int) -> list[Answer]:
    """Send requests to a server, and return its answers."""
    raws = send_all(server.port, requests, workers)
    return [read(request, raw) for request, raw in zip(requests, raws)]


class References:
    """Servers without our parts, one for each target, which are started when they are needed.

    Args:
        stack: ends them.
    """

    def __init__(self, options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self._options, self._stack = options, stack
        self._there: dict[str, tuple[Served, Slice, list[Answer]]] = {}

    def of(self, target: str) -> tuple[Served, Slice, list[Answer]]:
        """Return a target's server, the slice that it was sent, and its answers."""
        if target not in self._there:
            folder = self._options.out / f"plain-{target}"
            life = dataclasses.replace(PLAIN.lives[0], target=target)
            served = self._stack.enter_context(serving(life, folder, self._options.out))
            wanted = Slice.of(self._options, target)
            found, _ = served.ask(wanted, self._options.workers)
            say(f"== plain {target}: {dict(Counter(answer.status for answer in found))} ==")
            self._there[target] = served, wanted, found
        return self._there[target]


def run_arm(arm: Arm, references: References, options: argparse.Namespace) -> Iterator[Result]:
    """Start an arm's servers, one after the other; ask each, and compare."""
    metrics, served = "", None
    with contextlib.ExitStack() as stack:
        for number, life in enumerate(arm.lives):
            name = arm.name if len(arm.lives) == 1 else f"{arm.name}.{number}"
            say(f"== {name} ==")
            reference, wanted, expected = references.of(life.target)
            if life.reload and served is not None:
                replace_weights(served, TARGETS[life.target].flags(options.out)[0])
                served.seen = Watched()
            else:
                stack.close()
                served = stack.enter_context(serving(life, options.out / arm.name, options.out))
            if options.kill:
                yield killed(name, served, life, references, options)
                return
            begin = time.monotonic()
            found, troubles = served.ask(wanted, options.workers, arm.disturbances(), options.seed)
            seconds = time.monotonic() - begin
            if options.corrupt:
                spoil(found, options)
            judge = Judge(gap_by(reference.server.port), life.rules)
            result = compare_all(name, judge, wanted.compared, expected, found)
            result.seconds, result.troubles = seconds, troubles
            result.broken += [f"{name}, {n} times" for name, n in troubles.items() if ":" in name]
            metrics += metrics_of(served, result)
            if wanted.flood:
                result.figures = figures(served.seen, reference.seen)
                result.broken += judged(served.seen, reference.seen, wanted.kinds)
            if life is arm.lives[-1]:
                result.broken += [f"{name} is 0" for name in arm.idle(metrics)]
            report(result, wanted.compared, options.out)
            yield result


def killed(
    name: str, served: Served, life: Life, references: References, options: argparse.Namespace
) -> Result:
    """Ask an arm, one of whose ranks is killed meanwhile; compare what it has answered."""
    reference, wanted, expected = references.of(life.target)
    server, begin = served.server, time.monotonic()
    asked = wanted.requests, options.workers, options.kill
    found, seconds = kill.ask(server.port, server.group, *asked)
    lasted = time.monotonic() - begin
    judge = Judge(gap_by(reference.server.port), life.rules)
    there = [not kill.was_ended(answer) for answer in found]
    answered = [*compress(wanted.requests, there)]
    result = compare_all(
        name, judge, answered, [*compress(expected, there)], [*compress(found, there)]
    )
    result.rules["ended by the kill"] = len(found) - len(answered)
    result.requests, result.seconds = len(found), lasted
    result.broken += kill.judged(found, seconds)
    report(result, wanted.requests, options.out)
    return result


def replace_weights(served: Served, weights: str) -> None:
    """Replace a server's weights while it runs, and reset all caches, as the docs ask for."""
    reload(served.server.port, weights)
    for _ in range(50):
        said = call(served.server.port, "/reset_prefix_cache?reset_external=true")
        if json.loads(said)["success"]:
            return
        time.sleep(0.2)
    raise ServerError(f"{served.server.log}: the caches could not be reset")


def spoil(found: Sequence[Answer], options: argparse.Namespace) -> None:
    numbers = random.Random(options.seed)
    altered = sum(corrupted(answer, numbers, options.corrupt) for answer in found)
    say(f"  {altered} answers were altered on purpose")


def metrics_of(served: Served, result: Result) -> str:
    """Read a server's metrics, if it is still there."""
    try:
        return served.server.metrics()
    except OSError as error:
        result.broken.append(f"the server is gone ({error!r})")
        return ""


def report(result: Result, requests: Sequence[FuzzRequest], out: Path) -> None:
    """Print what no rule explains, and write it to a file."""
    by_number = {request.number: request for request in requests}
    for number, verdict in result.failed.items():
        for difference in verdict.differences[:3]:
            say(f"  UNEXPLAINED {number} {by_number[number].kinds}: {difference}")
    for line in result.broken:
        say(f"  BROKEN: {line}")
    told = {
        number: {
            "request": dataclasses.asdict(by_number[number]),
            "differences": [dataclasses.asdict(each) for each in verdict.differences],
        }
        for number, verdict in result.failed.items()
    }
    (out / f"{result.arm}.json").write_text(json.dumps(told, indent=1, default=repr))


def say(line: str) -> None:
    print(line, flush=True)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300, help="sent in each life of an arm")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--arms", nargs="+", choices=sorted(ARMS), default=["tree", "auto"])
    parser.add_argument("--flood", type=int, default=16, help="large requests of each kind")
    parser.add_argument("--workers", type=int, default=10, help="requests at a time")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of requests to send")
    parser.add_argument("--corrupt", type=int, default=0, help="alter one token in so many")
    parser.add_argument("--kill", type=int, default=0, help="kill a rank after so many answers")
    parser.add_argument("--log", type=Path, help="file that takes a line of JSON for each arm")
    parser.add_argument("--out", type=Path, help="folder for logs and differences")
    options = parser.parse_args(arguments)
    options.out = options.out or Path(tempfile.mkdtemp(prefix="vllm-graft-fuzz-"))
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    say(f"seed {options.seed}; logs: {options.out}")
    fine = True
    with contextlib.ExitStack() as stack:
        references = References(options, stack)
        for name in options.arms:
            try:
                for result in run_arm(ARMS[name], references, options):
                    fine &= told(result, options)
            except ServerError as error:
                say(str(error))
                fine &= told(Result(name, broken=[str(error)]), options)
    return 0 if fine else 1


def told(result: Result, options: argparse.Namespace) -> bool:
    """Print a result as a line of JSON, and collect it; return whether all is well."""
    line = result.line(options.seed)
    say(line)
    if options.log:
        with options.log.open("a") as log:
            log.write(line + "\n")
    return result.ok


if __name__ == "__main__":
    sys.exit(main())

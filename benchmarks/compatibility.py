"""Make the table of versions and machines that the tests ran on, from the runs on record.

    python -m pytest -v -m gpu tests > LOG
    python -m benchmarks.compatibility add LOG --commit 7216363 --vllm 0.33.0 --torch 2.11.0 \\
        --python 3.12.3 --device "NVIDIA H200"
    python -m benchmarks.compatibility show

`add` counts the results of a log by part and appends them to `docs/runs.json`. `show`
prints the table that stands in `docs/versions.md`. A part's cell says how many tests passed in the
newest run on that machine, and how many of those that failed have not passed in a run since.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RUNS = Path(__file__).parents[1] / "docs" / "runs.json"

PARTS = {
    "tests/spec_decode/drafters/test_chain": "draft graphs",
    "tests/graph_runners/language/": "draft graphs",
    "tests/graph_runners/vision/": "vision graphs",
    "tests/hicache/": "host cache",
    "tests/spec_decode/": "trees",
    "tests/": "plugin",
}
"""The part of a test by the beginning of its path; the first entry that fits counts."""

COLUMNS = ("trees", "draft graphs", "vision graphs", "host cache", "plugin")

_RESULT = re.compile(r"^(tests/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b")


class LogError(ValueError):
    """A log has no results of tests."""


@dataclass
class Run:
    """The results of one run of tests.

    Attributes:
        passed: tests that passed, by part.
        failed: names of tests that failed.
        mended: names of tests that failed in an earlier run on this machine and passed in this one.
        whole: whether all tests of the machine were asked for, so that the counts take the place of
            earlier ones.
    """

    date: str
    commit: str
    vllm: str
    torch: str
    python: str
    device: str
    passed: dict[str, int]
    failed: list[str] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)
    whole: bool = True

    @property
    def machine(self) -> tuple[str, str, str, str]:
        """The versions and the device that tell rows of the table apart."""
        return self.vllm, self.torch, self.python, self.device


def part_of(test: str) -> str:
    """Find the part that a test belongs to."""
    return next(part for start, part in PARTS.items() if test.startswith(start))


def results(log: str) -> dict[str, str]:
    """Read the outcome of each test from the output of ``pytest -v``.

    A test that passed and whose teardown failed counts as failed.

    Raises:
        LogError: no line tells an outcome.
    """
    found: dict[str, str] = {}
    for line in log.splitlines():
        if match := _RESULT.match(line):
            test, outcome = match.groups()
            bad = found.get(test) in ("FAILED", "ERROR")
            found[test] = found[test] if bad else outcome
    if not found:
        raise LogError("no line like 'tests/...::test PASSED'; run pytest with -v")
    return found


def read_runs(file: Path = RUNS) -> list[Run]:
    """Read all runs on record, oldest first."""
    return [Run(**values) for values in json.loads(file.read_text())]


def write_runs(runs: Sequence[Run], file: Path = RUNS) -> None:
    file.write_text(json.dumps([dataclasses.asdict(run) for run in runs], indent=1) + "\n")


def open_failures(runs: Iterable[Run]) -> list[str]:
    """List the tests of one machine's runs that failed and have not passed in a later run."""
    found: dict[str, None] = {}
    for run in runs:
        if run.whole:
            found.clear()
        for test in run.mended:
            found.pop(test, None)
        found |= dict.fromkeys(run.failed)
    return list(found)


def table(runs: Sequence[Run]) -> str:
    """Lay the table out in Markdown, newest vLLM first."""
    machines = sorted({run.machine for run in runs}, reverse=True)
    lines = [
        f"| vLLM | torch | Python | device | {' | '.join(COLUMNS)} | commit, date |",
        "|---" * (5 + len(COLUMNS)) + "|",
    ]
    for machine in machines:
        own = [run for run in runs if run.machine == machine]
        newest = [run for run in own if run.whole][-1]
        failing = Counter(part_of(test) for test in open_failures(own))
        cells = [_cell(newest, part, failing[part], own) for part in COLUMNS]
        lines.append(f"| {' | '.join([*machine, *cells, f'{own[-1].commit}, {own[-1].date}'])} |")
    return "\n".join(lines)


def _cell(newest: Run, part: str, failing: int, own: Sequence[Run]) -> str:
    later = own[own.index(newest) + 1 :]
    mended = sum(part_of(test) == part for run in later for test in run.mended)
    passed = newest.passed.get(part, 0) + mended
    if not passed and not failing:
        return "-"
    return f"{passed} passed" + (f", {failing} failed" if failing else "")


def add(arguments: argparse.Namespace, file: Path = RUNS) -> Run:
    """Append the run of a log.

    Raises:
        LogError: the log has no results.
    """
    runs = read_runs(file) if file.exists() else []
    found = results(arguments.log.read_text(errors="replace"))
    passed = [test for test, outcome in found.items() if outcome == "PASSED"]
    run = Run(
        date=arguments.date,
        commit=arguments.commit,
        vllm=arguments.vllm,
        torch=arguments.torch,
        python=arguments.python,
        device=arguments.device,
        passed=dict(sorted(Counter(map(part_of, passed)).items())),
        failed=[test for test, outcome in found.items() if outcome in ("FAILED", "ERROR")],
        whole=not arguments.some,
    )
    before = open_failures(one for one in runs if one.machine == run.machine)
    run.mended = [test for test in before if test in passed]
    write_runs([*runs, run], file)
    return run


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("show", help="print the table")
    added = commands.add_parser("add", help="append a run")
    added.add_argument("log", type=Path, help="output of pytest -v")
    for name in ("commit", "vllm", "torch", "python", "device"):
        added.add_argument(f"--{name}", required=True)
    added.add_argument("--date", default=datetime.date.today().isoformat())
    added.add_argument("--some", action="store_true", help="not all tests were asked for")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    if options.command == "show":
        print(table(read_runs()))
        return 0
    try:
        run = add(options)
    except LogError as error:
        print(f"{options.log}: {error}", file=sys.stderr)
        return 1
    print(f"{run.passed}, failed: {run.failed or 'none'}, mended: {run.mended or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

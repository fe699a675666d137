"""The benchmarks behind ``vllm-graft bench``; nothing heavy is imported before one runs.

A benchmark is a module with a docstring (its help), ``SUMMARY`` (one line), ``add_arguments`` and
``run``, and a line in :data:`BENCHMARKS`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from functools import partial
from typing import Protocol, cast

from vllm_graft.bench.common.report import exit_status, require_folder

BENCHMARKS = {
    "trees": "vllm_graft.bench.trees.command",
    "hicache": "vllm_graft.bench.hicache.command",
    "vit": "vllm_graft.bench.vision.command",
}
"""Name on the command line, and the module."""


class Benchmark(Protocol):
    """The interface of a benchmark's module. Importing it must import neither torch nor vLLM."""

    SUMMARY: str
    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the benchmark's own arguments; ``--json`` and ``--plot`` are there already."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure and report; returns the exit status."""


def load(name: str) -> Benchmark:
    """Import the benchmark of that name."""
    return cast(Benchmark, importlib.import_module(BENCHMARKS[name]))


def main(arguments: Sequence[str]) -> int:
    """Run ``vllm-graft bench``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="vllm-graft bench", description="measure; see vllm-graft bench BENCHMARK --help"
    )
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    for name in BENCHMARKS:
        benchmark = load(name)
        sub = commands.add_parser(
            name,
            help=benchmark.SUMMARY,
            description=benchmark.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        benchmark.add_arguments(sub)
        sub.add_argument("--json", metavar="FILE", help="write what was measured here")
        sub.add_argument("--plot", metavar="FILE.svg", help="draw it here (needs matplotlib)")
        sub.set_defaults(command=partial(_run, name))
    given = parser.parse_args(arguments)
    status: int = given.command(given)
    return status


def _run(name: str, arguments: argparse.Namespace) -> int:
    def work() -> int:
        require_folder("--json", arguments.json)
        require_folder("--plot", arguments.plot)
        return load(name).run(arguments)

    return exit_status(f"vllm-graft bench {name}", work)

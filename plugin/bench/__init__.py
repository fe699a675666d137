"""The benchmarks behind ``vllm-graft bench``; nothing heavy is imported before one runs. A
benchmark is a module with a docstring (its help), ``SUMMARY`` (one line), ``add_arguments`` and
``run``, which also gets the model and the flags of ``vllm serve``, and a line in `BENCHMARKS`."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from vllm_graft.bench.common.report import exit_status, require_folder, require_plotting

BENCHMARKS = {
    "trees": "vllm_graft.bench.trees.command",
    "hicache": "vllm_graft.bench.hicache.command",
    "vit": "vllm_graft.bench.vision.command",
}
"""Name on the command line, and the module."""

ABOUT = """
All flags that are not listed here are those of `vllm serve`, read by its own parser; the last line
is the command to use. Each arm is an engine of its own in a process of its own. If they fit into
the GPU's memory together, all are up at the same time, and take turns; else one follows another,
and each measures all there is.
"""
"""Ends the help of each benchmark."""


def load(name: str) -> Any:
    """Import the module of a benchmark."""
    return importlib.import_module(BENCHMARKS[name])


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
            description=benchmark.__doc__ + ABOUT,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=f"%(prog)s MODEL [flags of vllm serve] [flags of {name}, below]",
            # Nothing but the whole name of a flag is ours: the others are vLLM's.
            allow_abbrev=False,
        )
        benchmark.add_arguments(sub)
        sub.add_argument("--output", metavar="FILE.json", help="write what was measured here")
        sub.add_argument("--plot", metavar="FILE.svg", help="draw it here (needs matplotlib)")
        sub.set_defaults(command=partial(_run, name))
    if not arguments:
        parser.print_help()
        return 2
    given, flags = parser.parse_known_args(arguments)
    return int(given.command(given, flags))


def _run(name: str, arguments: argparse.Namespace, flags: list[str]) -> int:
    def work() -> int:
        require_folder("--output", arguments.output)
        require_folder("--plot", arguments.plot)
        require_plotting(arguments.plot)
        _quiet()
        return int(load(name).run(arguments, flags))

    return exit_status(f"vllm-graft bench {name}", work)


def _quiet() -> None:
    """Leave vLLM's log to warnings, unless the environment asks for more."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    print("Reading the flags with vLLM, whose import takes some time.", file=sys.stderr, flush=True)

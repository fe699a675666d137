"""Host KV-cache connectors side by side: none, vLLM's own (`native`) and ours.

    vllm-graft bench hicache --model MODEL            (one GPU)
    vllm-graft bench hicache --tiny --device cpu      (no GPU: checks the benchmark only)

All arms are up at the same time, each in a process of its own, and take turns. Parts: `copy` (GB/s
of our copies beside memcpy), `ttft` (a long prefix that only the host still has, and a new suffix),
`decode` (tokens a second while K/V is written back), `load` (concurrent multi-turn sessions with
more K/V than the device holds), `race` (full hits in FULL CUDA graphs with slow copies; their
tokens must be right). Rows are printed as they come; the tables are at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_graft.hicache.bench import report as reports
from vllm_graft.hicache.bench.arms import Arm, Plan
from vllm_graft.hicache.bench.sizes import TINY, Sizes

SUMMARY = "a host KV cache beside vLLM's own and none: first tokens, decoding, load, races"
PARTS = ("copy", "ttft", "decode", "load", "race")


def add_arguments(found: argparse.ArgumentParser) -> None:
    """Add the benchmark's own arguments; ``--json`` and ``--plot`` are there already."""
    found.add_argument("--model", type=Path, help="checkpoint folder; --tiny makes one")
    found.add_argument("--race-model", type=Path, help="checkpoint of the race (default: --model)")
    found.add_argument("--arms", nargs="+", default=["none", "native", "ours"])
    found.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    found.add_argument("--seconds", type=float, default=60, help="limit of a part on an arm")
    found.add_argument("--start-seconds", type=float, default=240, help="limit of an engine start")
    found.add_argument("--race-count", type=int, default=5000)
    found.add_argument("--race-loads", nargs="+", default=["layerwise", "async"])
    found.add_argument("--one-by-one", action="store_true", help="start engines one by one")
    found.add_argument("--connector-module", help="where our connector is not known by name")
    found.add_argument("--connector", default="HiCacheConnector")
    found.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="change a size")


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    """The sizes that the arguments ask for.

    Raises:
        SystemExit: a name is not a size, or its value not a number.
    """
    sizes = TINY if arguments.tiny else Sizes()
    known = {field.name: getattr(sizes, field.name) for field in dataclasses.fields(sizes)}
    for change in arguments.set:
        name, _, value = change.partition("=")
        if name not in known:
            sys.exit(f"--set {change}: sizes are {', '.join(known)}")
        try:
            if isinstance(known[name], tuple):
                known[name] = tuple(int(part) for part in value.split(","))
            else:
                known[name] = type(known[name])(value)
        except ValueError:
            sys.exit(f"--set {change}: {value!r} is not a number")
    return Sizes(**known)


def say(line: str) -> None:
    """Print at once."""
    print(line, flush=True)


class Run:
    """One run of the command."""

    def __init__(self, arguments: argparse.Namespace, sizes: Sizes) -> None:
        self._arguments, self._sizes = arguments, sizes
        self.report = reports.Report(Path(arguments.json) if arguments.json else None, say)
        self._arms: dict[str, Arm] = {}
        self._races: dict[str, Arm] = {}

    def start(self, parts: list[str]) -> None:
        """Start every engine that the parts need, at the same time unless told otherwise."""
        arguments, sizes = self._arguments, self._sizes
        common = (arguments.model, arguments.device)
        ours = {"connector": arguments.connector, "module": arguments.connector_module}
        if {"ttft", "decode", "load"} & set(parts):
            for name in arguments.arms:
                self._arms[name] = Arm(Plan(name, *common, sizes, **ours))
                self._stagger([self._arms[name]])
        if "race" in parts:
            small = dataclasses.replace(
                sizes,
                gpu_tokens=sizes.race_gpu_tokens,
                host_gib=sizes.race_host_gib,
                max_num_seqs=sizes.race_batch,
                # One graph, to which every batch is padded.
                capture=(sizes.race_batch,),
            )
            model = arguments.race_model or arguments.model
            for load in arguments.race_loads:
                name = "race:" + json.dumps({"load": load})
                self._races[load] = Arm(Plan(name, model, arguments.device, small, **ours))
                self._stagger([self._races[load]])
        if not arguments.one_by_one:
            self._ready(self._engines())

    def _engines(self) -> list[Arm]:
        return [*self._arms.values(), *self._races.values()]

    def _stagger(self, arms: list[Arm]) -> None:
        if self._arguments.one_by_one:
            self._ready(arms)
        else:
            time.sleep(1)

    def _ready(self, arms: list[Arm]) -> None:
        for arm in arms:
            self.report.add("start", arm.name, arm.wait(self._arguments.start_seconds))

    def warm(self) -> None:
        """Run every shape once."""
        for arm in self._engines():
            self.report.add("warm", arm.name, arm.call("warm", limit=120))

    def copy(self) -> None:
        """Bandwidth of our copies and of memcpy."""
        from vllm_graft.hicache.bench import copies

        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self._arguments.device, self._arguments.tiny)
        process = context.Process(target=copies.serve, args=arguments)
        process.start()
        theirs.close()
        rows: list[dict[str, Any]] = [{"what": "engine", "error": "no answer"}]
        with contextlib.suppress(EOFError):
            if ours.poll(self._arguments.seconds + 60):
                rows = ours.recv()
        for row in rows:
            self.report.add("copy", row.pop("what"), row)
        process.kill()
        process.join()

    def ttft(self) -> None:
        """Arms take turns; each repeat has its own prefix."""
        limit = time.perf_counter() + self._arguments.seconds * len(self._arms)
        for repeat in range(self._sizes.ttft_repeats):
            for name, arm in self._arms.items():
                if time.perf_counter() < limit:
                    self.report.add("ttft", name, arm.call("ttft", str(repeat)))

    def decode(self) -> None:
        """Arms take turns."""
        limit = time.perf_counter() + self._arguments.seconds * len(self._arms)
        for number in range(self._sizes.decode_rounds):
            for name, arm in self._arms.items():
                if time.perf_counter() < limit:
                    self.report.add("decode", name, arm.call("decode", str(number)))

    def load(self) -> None:
        """One arm after the other, as each fills its caches."""
        seconds = self._arguments.seconds
        for name, arm in self._arms.items():
            self.report.add("load", name, arm.call("load", seconds, limit=seconds + 60))

    def race(self) -> None:
        """Full hits while copies are slow."""
        seconds, count = self._arguments.seconds, self._arguments.race_count
        for load, arm in self._races.items():
            self.report.add("race-control", load, arm.call("control"))
            found = arm.call("race", count, seconds, limit=seconds + 60)
            self.report.add("race", load, found)

    def close(self) -> None:
        """Shut everything down."""
        for arm in self._engines():
            arm.close()

    def finish(self) -> None:
        """Print the tables and draw the plot."""
        arms = self._arguments.arms
        say("\n" + reports.arms_table(self.report, arms))
        say("\n" + reports.bars_table(self.report, arms))
        if self._arguments.plot:
            say(reports.plot(self.report, arms, Path(self._arguments.plot)))


def describe_machine() -> str:
    """What a figure depends on, in a line. `/dev/shm` is where vLLM's own connector keeps K/V."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    shm = shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").exists() else 0
    cores = len(os.sched_getaffinity(0))
    return f"{device}, {cores} cores, torch {torch.__version__}, {shm:.0f} GiB free in /dev/shm"


def main(argv: Sequence[str] | None = None) -> int:
    """Without ``vllm-graft bench``: parse the arguments and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write what was measured here")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw it here (needs matplotlib)")
    return run(parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark. The status is 1 if an arm failed or an answer was wrong."""
    parts = [part for part in arguments.only.split(",") if part]
    if unknown := [part for part in parts if part not in PARTS]:
        sys.exit(f"--only {','.join(unknown)}: parts are {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.model is None:
            if not arguments.tiny:
                sys.exit("--model is missing: a checkpoint folder, or --tiny for a made-up one")
            from vllm_graft.testing import write_llama

            arguments.model = write_llama(Path(scratch) / "tiny")
        one = Run(arguments, sizes_of(arguments))
        # Shut the engines down when a time limit ends the run.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        say(describe_machine())
        try:
            if "copy" in parts:
                one.copy()
            one.start(parts)
            one.warm()
            for part in parts:
                if part != "copy":
                    getattr(one, part)()
        finally:
            one.close()
            one.finish()
    bad = [row for row in one.report.rows if row.get("error") or row.get("wrong")]
    return 1 if bad else 0

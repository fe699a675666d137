"""Two engines that take turns, and what they have shown so far."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.bars import engine_probe, step_pace, step_timeline
from benchmarks.bars.windows import Cell, Side, Window, device_lines, read_cells, step_table, table
from benchmarks.pair_arms import read_arms
from benchmarks.pair_arms import start as start_engines
from benchmarks.step_bytes import StepBytes, step_bytes
from benchmarks.watched_loop import Call, Watched
from benchmarks.workloads.load import load_of
from vllm_graft.bench.common import report
from vllm_graft.bench.common.closed_loop import Ask, Case
from vllm_graft.bench.trees.arm_flags import is_chain

WARM_UP_TOKENS = 16
STEPS = "a step's time, tokens per read of the target's weights, bandwidth used:"
LARGE = 64
"""Large batches: from this one on stock's chain failed in three of seven runs.

Its engine died, or all its drafts were rejected."""


class Bars:
    """Two engines that take turns, and their measurements so far.

    Args:
        pipes: how to reach `chain`, stock's engine, `ours`, and others by the names of their arms;
            they answer as `pair_arms.start` says.
        tokens: tokens of each answer.
        json: written after each window; None for nowhere.
    """

    def __init__(self, pipes: Mapping[str, Connection], tokens: int, json: str | None) -> None:
        self.pipes = dict(pipes)
        self.chains = [name for name in self.pipes if is_chain(name)]
        self.tokens, self.json = tokens, json
        self.settings: dict[str, str] = {}
        self.windows: list[Window] = []
        self.device: dict[str, dict[str, Any]] = {}
        self.steps: dict[str, list[str]] = {}
        self._took: dict[Cell, float] = {}
        self._needed: dict[str, StepBytes | None] = {}
        self._warm: set[tuple[int, bool]] = set()

    def measure(self, cells: Sequence[Cell], rounds: int, until: float) -> None:
        """Go round the cells, leaving out the windows that don't fit into the time left."""
        turns = itertools.product(range(rounds), cells)
        for number, cell in sorted(turns, key=lambda turn: turn[1].batch >= LARGE):
            if until - time.perf_counter() > self._took.get(cell, 0.0):
                self._window(cell, number)

    def measure_device(self, with_kernels: bool) -> None:
        """Measure bars 3 and 4 in our engine."""
        self.device = self._ask("ours", Call(engine_probe.device_bars, (with_kernels,)))
        print(*device_lines(self.device), sep="\n", flush=True)
        self.write()

    def measure_steps(self, cells: Sequence[Cell]) -> None:
        """Profile where the device's time of a step goes, in stock's engine and ours."""
        for cell in cells:
            # No request may end while the steps are profiled.
            case = Case(cell.temperature, cell.batch, cell.batch + 1, 2 * self.tokens)
            self._warm_up(cell, case)
            for name in ("chain", "ours"):
                self._ask(name, Call(step_timeline.watch_steps))
                self._serve(name, cell, case)
                found = self._ask(name, Call(step_timeline.step_lines))
                key = f"t {cell.temperature:g} batch {cell.batch} {name}"
                self.steps[key] = found
                print(f"{key}: a step of the device", *found, sep="\n", flush=True)
            self.write()

    def write(self) -> None:
        """Write all results at once: a process that is killed leaves the old file or the new."""
        if self.json is None:
            return
        windows = [
            {**asdict(window), "bar": window.cell.bar, "host_ratio": window.host_ratio}
            for window in self.windows
        ]
        values = {
            "settings": self.settings,
            "windows": windows,
            "device": self.device,
            "steps": self.steps,
            "table": table(self.windows),
            "step_table": step_table(self.windows),
        }
        report.write_json(f"{self.json}.new", values, quiet=True)
        os.replace(f"{self.json}.new", self.json)

    def close(self) -> None:
        """Let the engines end."""
        for pipe in self.pipes.values():
            # An engine that died accepts no message.
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()

    def _window(self, cell: Cell, number: int) -> None:
        first = number * cell.requests
        case = Case(cell.temperature, cell.batch, cell.requests, self.tokens, first=first)
        self._warm_up(cell, case)
        began = time.perf_counter()
        names = list(self.pipes) if number % 2 == 0 else list(self.pipes)[::-1]
        sides = {name: self._turn(name, cell, case) for name in names}
        chain, ours = sides.pop("chain"), sides.pop("ours")
        window = Window(cell, number, chain, ours, ours.rate / chain.rate, sides)
        self.windows.append(window)
        self._took[cell] = time.perf_counter() - began
        print(window, flush=True)
        self.write()

    def _turn(self, name: str, cell: Cell, case: Case) -> Side:
        if name not in self._needed:
            self._needed[name] = self._ask(name, Call(step_bytes))
        self._ask(name, Call(engine_probe.watch_host, (cell.batch,)))
        self._ask(name, Call(step_pace.watch_pace, (cell.batch,)))
        began = time.perf_counter()
        measured = self._serve(name, cell, case)
        seconds = time.perf_counter() - began
        # The last to wrap the scheduler's methods is the first to unwrap them.
        pace = self._ask(name, Call(step_pace.paces))
        host = self._ask(name, Call(engine_probe.host_times))
        needed = self._needed[name]
        return Side(
            measured.rate,
            measured.acceptance,
            measured.sent,
            host,
            seconds,
            measured.nodes,
            pace,
            measured.step * 1e3,
            measured.rate * measured.step,
            needed.use(measured.step, measured.held) if needed else None,
        )

    def _serve(self, name: str, cell: Cell, case: Case) -> Watched:
        """Have an engine run a case; an engine of chains is told how many drafts."""
        measured: Watched = self._ask(name, self._told(name, cell, case))
        return measured

    def _told(self, name: str, cell: Cell, case: Case) -> Case:
        return replace(case, drafts=cell.chain) if name in self.chains else case

    def _warm_up(self, cell: Cell, case: Case) -> None:
        """Warm all engines up at once, for each batch, greedy or not, to compile kernels."""
        kind = (cell.batch, cell.temperature > 0)
        if kind in self._warm:
            return
        self._warm.add(kind)
        short = replace(case, max_tokens=min(WARM_UP_TOKENS, self.tokens))
        short = replace(short, requests=cell.batch + max(1, cell.batch // 2))
        for name, pipe in self.pipes.items():
            pipe.send(Ask(self._told(name, cell, short), margins=False))
        for name in self.pipes:
            self._answer(name)

    def _ask(self, name: str, wish: Case | Call) -> Any:
        self.pipes[name].send(wish)
        return self._answer(name)

    def _answer(self, name: str) -> Any:
        try:
            return self.pipes[name].recv()
        except EOFError:
            raise report.BenchmarkError(f"{name}: its engine died; its log is above") from None


def start(arguments: argparse.Namespace) -> Bars:
    """Start both engines.

    Raises:
        BenchmarkError: an engine did not start, or arms or cells can't be read.
    """
    arguments.requests_in_flight = [arguments.max_num_seqs]
    arguments.steps, roles = arguments.auto_steps, ["chain", "ours", *arguments.others]
    arguments.arms = [arguments.chain, arguments.tree, *arguments.others]
    arms = dict(zip(roles, read_arms(arguments), strict=True))
    chain = arms["chain"]
    if not chain.drafts:
        raise report.BenchmarkError(
            f"--chain {arguments.chain!r}: name several lengths, as in sampled:3,5,7, so that the "
            "engine can be told which"
        )
    arguments.cells = read_cells(arguments.cells, chain.drafts, arguments.max_num_seqs)
    wanted = arguments.rounds * max(cell.requests for cell in arguments.cells)
    load = load_of(arguments, arguments.workload, wanted)
    pipes = start_engines(list(arms.values()), arguments, load)
    bars = Bars({role: pipes[arm] for role, arm in arms.items()}, arguments.tokens, arguments.json)
    bars.settings = {name: str(value) for name, value in vars(arguments).items()}
    return bars


def run(arguments: argparse.Namespace) -> None:
    """Start the engines, measure, print the table."""
    report.require_folder("--json", arguments.json)
    bars = start(arguments)
    until = time.perf_counter() + (math.inf if arguments.seconds is None else arguments.seconds)
    try:
        if arguments.device == "first":
            bars.measure_device(with_kernels=False)
        bars.measure(arguments.cells, arguments.rounds, until)
        # Profiling comes last: launches of a process take longer after it was profiled.
        if arguments.device == "last" or arguments.kernels:
            bars.measure_device(arguments.kernels)
        bars.measure_steps(arguments.cells[: arguments.timeline])
    finally:
        bars.close()
        tables = [table(bars.windows), STEPS, step_table(bars.windows)]
        print(*tables, *device_lines(bars.device), sep="\n", flush=True)

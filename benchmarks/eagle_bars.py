"""The speed bars of our trees against the best chain of stock vLLM, in one call on one GPU.

    python benchmarks/eagle_bars.py PAIR --json bars.json --seconds 330 --kv-cache-bytes 8000000000

PAIR holds `target/`, `eagle3/` and `prompts.json`, as `tests/pair` does. Two engines are up side by
side, as in `vllm-graft bench trees`: stock's sampled chain, told its length for each cell, and
`shape: auto`. They take turns, a window each of as many requests in flight as the cell's batch,
with the same prompts and seeds; the next round of windows has others. A cell is a temperature, a
batch, the chain that is the best there, and how many requests a window has. Each window is one
line, and `--json` is written anew after it, so that a run that is cut short keeps what it has. A
window that would not end within `--seconds` (from when the engines are up) is left out. Engines of
`--others` take their turn as well, chains of the cell's length or trees: with `--tree auto:63+fp8
--others sampled:3,5,7+fp8` our drafts in FP8 meet the chain's as they are loaded, and the chain's
in FP8.

The host's time a step (bar 5) and how fast steps follow each other (`bars_pace.py`) are taken
within the windows, in all engines. Large batches come after all rounds of the others: stock's chain
has died in them. Two bars are of the device alone, in our engine (`bars_engine.py`): all passes of
the draft over its levels beside reading their weights at a copy's rate (bar 3), and the target's
pass over 32 rows beside one (bar 4). They come last unless `--device first` is given, as a fault
there must not cost the windows. `--kernels` lists what these two launch, `--timeline` profiles a
few steps of the first cells in both engines (`bars_timeline.py`): after the windows, as a process
that was profiled launches more slowly from then on.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import bars_engine
import bars_nodes
import bars_pace
import bars_timeline
from bars_report import DEFAULT_CELLS, Cell, Side, Window, device_lines, read_cells, table

from vllm_graft.bench.common import report
from vllm_graft.bench.common.closed_loop import Ask, Call, Case, Measured, fix_drafts
from vllm_graft.bench.common.engine_arms import is_ours, read_arm
from vllm_graft.bench.common.timing import Deadline
from vllm_graft.bench.trees import command as eagle

WARM_UP_TOKENS = 16
LARGE = 64
"""From this batch on stock's chain died, or had all its drafts rejected, in three of seven runs."""


class Bars:
    """Two engines that take turns, and what they have shown so far.

    Args:
        pipes: how to reach `chain`, stock's engine, `ours`, and others by the names of their arms;
            they answer as `eagle.serve` does.
        tokens: of each request.
        json: written after each window; None for nowhere.
    """

    def __init__(self, pipes: Mapping[str, Connection], tokens: int, json: str | None) -> None:
        self.pipes = dict(pipes)
        self.chains = [name for name in self.pipes if name != "ours" and not is_ours(name)]
        self.tokens, self.json = tokens, json
        self.settings: dict[str, str] = {}
        self.windows: list[Window] = []
        self.device: dict[str, dict[str, Any]] = {}
        self.steps: dict[str, list[str]] = {}
        self._took: dict[Cell, float] = {}
        self._warm: set[tuple[int, bool]] = set()

    def measure(self, cells: Sequence[Cell], rounds: int, deadline: Deadline) -> None:
        """Go round the cells, leaving out the windows that don't fit into the time left."""
        turns = itertools.product(range(rounds), cells)
        for number, cell in sorted(turns, key=lambda turn: turn[1].batch >= LARGE):
            if deadline.left > self._took.get(cell, 0.0):
                self._window(cell, number)

    def measure_device(self, with_kernels: bool) -> None:
        """Bars 3 and 4, in our engine."""
        self.device = self._ask("ours", Call(bars_engine.device_bars, (with_kernels,)))
        print(*device_lines(self.device), sep="\n", flush=True)
        self.write()

    def measure_steps(self, cells: Sequence[Cell]) -> None:
        """Where the device's time of a step goes, in stock's engine and ours."""
        for cell in cells:
            # Nobody ends while it is looked at.
            case = Case(cell.temperature, cell.batch, cell.batch + 1, 2 * self.tokens)
            self._warm_up(cell, case)
            for name in ("chain", "ours"):
                self._ask(name, Call(bars_timeline.watch_steps))
                self._serve(name, cell, case)
                found = self._ask(name, Call(bars_timeline.step_lines))
                key = f"t {cell.temperature:g} batch {cell.batch} {name}"
                self.steps[key] = found
                print(f"{key}: a step of the device", *found, sep="\n", flush=True)
            self.write()

    def write(self) -> None:
        """Write all there is, at once: whoever kills this process finds the old file or the new."""
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
        }
        report.write_json(f"{self.json}.new", values, quiet=True)
        os.replace(f"{self.json}.new", self.json)

    def close(self) -> None:
        """Let the engines end."""
        for pipe in self.pipes.values():
            # One that died takes no word.
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
        self._ask(name, Call(bars_engine.watch_host, (cell.batch,)))
        self._ask(name, Call(bars_nodes.watch_nodes))
        self._ask(name, Call(bars_pace.watch_pace, (cell.batch,)))
        began = time.perf_counter()
        measured = self._serve(name, cell, case)
        seconds = time.perf_counter() - began
        # The last to wrap the scheduler's methods is the first to unwrap them.
        pace = self._ask(name, Call(bars_pace.paces))
        nodes = self._ask(name, Call(bars_nodes.nodes_used))
        host = self._ask(name, Call(bars_engine.host_times))
        return Side(measured.rate, measured.acceptance, measured.sent, host, seconds, nodes, pace)

    def _serve(self, name: str, cell: Cell, case: Case) -> Measured:
        """Have an engine run a case; one of chains is told its drafts."""
        told = replace(case, drafts=cell.chain) if name in self.chains else case
        measured: Measured = self._ask(name, told)
        return measured

    def _warm_up(self, cell: Cell, case: Case) -> None:
        """Once a batch, greedy or not: kernels are compiled for what they meet. Both at once."""
        kind = (cell.batch, cell.temperature > 0)
        if kind in self._warm:
            return
        self._warm.add(kind)
        short = replace(case, max_tokens=min(WARM_UP_TOKENS, self.tokens))
        short = replace(short, requests=cell.batch + max(1, cell.batch // 2))
        for name in self.chains:
            self._ask(name, Call(fix_drafts, (cell.chain,)))
        for pipe in self.pipes.values():
            pipe.send(Ask(short, margins=False))
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
    pair: Path = arguments.pair
    prompts = [text[: arguments.prompt] for text in json.loads((pair / "prompts.json").read_text())]
    arguments.batch = [arguments.max_num_seqs]
    names = {"chain": arguments.chain, "ours": arguments.tree}
    names |= {name: name for name in arguments.others}
    arms = {
        role: read_arm(
            name, pair / "eagle3", arguments.topk, arguments.auto_steps, arguments.max_num_seqs
        )
        for role, name in names.items()
    }
    chain = arms["chain"]
    if not chain.drafts:
        raise report.BenchmarkError(
            f"--chain {arguments.chain!r}: name several lengths, as in sampled:3,5,7, so that the "
            "engine can be told which"
        )
    arguments.cells = read_cells(arguments.cells, chain.drafts, arguments.max_num_seqs)
    pipes = eagle.start(list(arms.values()), arguments, prompts)
    bars = Bars({role: pipes[arm] for role, arm in arms.items()}, arguments.tokens, arguments.json)
    bars.settings = {name: str(value) for name, value in vars(arguments).items()}
    return bars


def run(arguments: argparse.Namespace) -> None:
    """Start the engines, measure, print the table."""
    report.require_folder("--json", arguments.json)
    bars = start(arguments)
    deadline = Deadline(arguments.seconds)
    try:
        if arguments.device == "first":
            bars.measure_device(with_kernels=False)
        bars.measure(arguments.cells, arguments.rounds, deadline)
        # Once a process was profiled, its launches take longer: that comes last.
        if arguments.device == "last" or arguments.kernels:
            bars.measure_device(arguments.kernels)
        bars.measure_steps(arguments.cells[: arguments.timeline])
    finally:
        bars.close()
        print(table(bars.windows), *device_lines(bars.device), sep="\n", flush=True)


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", type=Path)
    parser.add_argument("--json", metavar="FILE", help="written anew after each window")
    parser.add_argument("--seconds", type=float, help="for windows; without it, --rounds ends them")
    parser.add_argument("--rounds", type=int, default=4, help="windows of a cell at most")
    parser.add_argument("--cells", default=DEFAULT_CELLS, metavar="[[T,BATCH,CHAIN,REQUESTS],...]")
    parser.add_argument("--chain", default="sampled:3,5,7", help="stock's engine")
    parser.add_argument("--tree", default="auto:63", help="ours")
    parser.add_argument("--others", nargs="+", default=[], metavar="ARM", help="engines besides")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--auto-steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256, help="tokens a request")
    parser.add_argument("--prompt", type=int, default=400, help="characters of a prompt")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--sizes", nargs="+", type=int, help="cudagraph_capture_sizes of both")
    parser.add_argument("--kv-cache-bytes", type=int, help="of each; they start together then")
    parser.add_argument("--kernels", action="store_true", help="list those of bars 3 and 4")
    parser.add_argument("--timeline", type=int, default=0, metavar="N", help="profile N cells")
    parser.add_argument("--device", choices=("last", "first", "off"), default="last")
    arguments = parser.parse_args(given)
    return report.exit_status("eagle_bars.py", functools.partial(run, arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

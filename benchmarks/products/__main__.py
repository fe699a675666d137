"""Probe: are products faster whose weights are loaded while the kernel before still runs?

    python3 -m benchmarks.products --seconds 200 --json products.json

A chain of decoder layers with weights of their own runs in one CUDA graph: norm, qkv, a stand-in
for attention, o, norm, gate_up, SiLU, down. For each number of rows it searches for the fastest
plan of each product, timed between the small kernels around it, then times whole layers:

- ``cublas``: PyTorch's products; nothing is overlapped. ``cublas+small pdl``: our small kernels
  begin early (programmatic dependent launch).
- ``ours``: the best plans of ours without an overlap. ``ours+pdl``: all kernels begin early, and
  products load weights before they wait for the kernel before.
- ``gate_up+pdl``: as ``cublas+small pdl``, with our gate_up alone. ``winners+pdl``: ours where it
  won alone; ``winners, other NAME``: that with NAME the other way.

Each plan is checked against float32, and each arm's replays for equal bits. The file is written
after each number of rows. The exit status is 2 where nothing was measured.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention.search.compiling import Compilers
from benchmarks.products import report, smoke
from benchmarks.products.findings import FoundRows
from benchmarks.products.product_call import Space
from benchmarks.products.search import Search
from benchmarks.products.shapes import LLAMA_8B, Buffers
from benchmarks.products.timing import GraphClock, copy_rate

ROWS = (32, 16, 128, 8, 1, 64)
"""The most important first."""

GRACE = 60
"""Seconds after which a kernel that never ends ends the command."""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.products",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--seconds", type=float, default=200, help="time for all numbers of rows")
    made.add_argument("--rows", type=int, nargs="*", default=ROWS, help="numbers of rows")
    made.add_argument("--layers", type=int, default=6, help="layers of the chain")
    made.add_argument("--few", type=int, default=0, help="about so many first plans, 0: all")
    made.add_argument(
        "--without", nargs="*", default=[], choices=list(smoke.PLANS), help="kinds not to try"
    )
    made.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    made.add_argument("--json", type=Path, help="file that takes the results")
    return made


def run(
    search: Search, rows: list[int], deadline: float, file: Path | None, about: dict[str, Any]
) -> list[FoundRows]:
    """Search for each number of rows until the deadline, shared equally."""
    found: list[FoundRows] = []
    for number, each in enumerate(rows):
        for later in rows[number : number + 2]:
            search.start(later)
        now = time.monotonic()
        until = now + max(0.0, deadline - now) / (len(rows) - number)
        found.append(search.run(each, until))
        print("\n".join(report.lines(found[-1])), flush=True)
        report.write(file, about, found)
    return found


def main(arguments: list[str]) -> int:
    begin = time.monotonic()
    options = parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.products needs a GPU: nothing was measured", file=sys.stderr)
        return 2
    properties = torch.cuda.get_device_properties(0)
    if properties.major != 9:
        print("benchmarks.products needs compute capability 9.x", file=sys.stderr)
        return 2
    faulthandler.dump_traceback_later(options.seconds + GRACE, exit=True)
    trials = {kind: smoke.start(kind) for kind in smoke.PLANS if kind not in options.without}
    compilers = Compilers(("cuda", 90, 32), options.processes)
    try:
        clock = GraphClock()
        # The rate of a copy is measured when nothing else runs.
        wrong = {kind: smoke.result(trial) for kind, trial in trials.items()}
        about: dict[str, Any] = {
            "device": properties.name,
            "torch": torch.__version__,
            "copy rate": copy_rate(clock, "cuda"),
            "layers": options.layers,
        }
        about["kinds that fail"] = {kind: each for kind, each in wrong.items() if each}
        print(about, flush=True)
        buffers = Buffers(LLAMA_8B, options.layers, max(options.rows), "cuda")
        sms = properties.multi_processor_count
        search = Search(
            buffers,
            Space.allocate(LLAMA_8B.products, sms, "cuda"),
            clock,
            compilers,
            about["copy rate"],
            few=options.few,
            kinds=frozenset(kind for kind, each in wrong.items() if not each),
        )
        found = run(search, list(options.rows), begin + options.seconds, options.json, about)
        about["compiled"] = compilers.count
        report.write(options.json, about, found)
    finally:
        compilers.close()
    print(f"{compilers.count} kernels, {time.monotonic() - begin:.0f} s")
    return 0 if any(each.arms for each in found) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

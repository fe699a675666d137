"""Measure our trees against the best chain of stock vLLM and the speed bars, on one GPU.

    python -m benchmarks.bars PAIR --json bars.json --seconds 330 --kv-cache-bytes 8000000000

PAIR holds `target/`, `eagle3/` and `prompts.json`, as `tests/pair` does. Two engines are up side by
side, as in `vllm-graft bench trees`: stock's chain with its strongest settings (sampled drafts in
FP8, verified as a block), told its length for each cell, and `shape: auto` with a draft in FP8.
They take turns. In its turn an engine serves one window, with as many requests in flight as the
cell's batch and the same prompts and seeds as the other engine; the next round of windows has other
prompts. A cell is a temperature, a batch, the chain that is the best there, and
how many requests a window has. Each window is one line, and `--json` is written anew after it, so
that a run that is cut short keeps what it has. A window that would not end within `--seconds` (from
when the engines are up) is left out. Engines of `--others`, chains of the cell's length, stock's
n-grams or trees, take their turn as well; with stock's engines among them, the table's last column
is ours over the fastest of those. A second table has a step's time, the tokens that one read of the
target's weights yields, and the share of the memory's bandwidth that a step uses.

The host's time per step (bar 5) and how fast steps follow each other (`step_pace.py`) are taken
within the windows, in all engines. Large batches come after all rounds of the others: stock's chain
has died in them. Two bars concern the device alone, in our engine (`engine_probe.py`): all passes
of the draft over its levels beside reading their weights at a copy's rate (bar 3), and the target's
pass over 32 rows beside one (bar 4). They come last unless `--device first` is given, as a fault
there must not cost the windows. `--kernels` lists what these two launch, `--timeline` profiles a
few steps of the first cells in both engines (`step_timeline.py`): after the windows, as a process
that was profiled launches more slowly from then on.
"""

from __future__ import annotations

import argparse
import functools
import sys

from benchmarks.bars import contest
from benchmarks.bars.windows import DEFAULT_CELLS
from benchmarks.pair_arms import add_pair_arguments
from benchmarks.workloads.load import OWN
from vllm_graft.bench.common import report


def read_arguments(given: list[str]) -> argparse.Namespace:
    """Read the arguments of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_pair_arguments(parser)
    parser.add_argument("--workload", default=OWN, help="as of benchmarks.speeds")
    parser.add_argument("--json", metavar="FILE", help="written anew after each window")
    parser.add_argument("--seconds", type=float, help="for windows; without it, --rounds ends them")
    parser.add_argument("--rounds", type=int, default=4, help="windows of a cell at most")
    parser.add_argument("--cells", default=DEFAULT_CELLS, metavar="[[T,BATCH,CHAIN,REQUESTS],...]")
    parser.add_argument("--chain", default="block:3,5,7+fp8", help="stock's engine")
    parser.add_argument("--tree", default="auto:63+fp8", help="ours")
    parser.add_argument("--others", nargs="+", default=[], metavar="ARM", help="engines besides")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per request")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--kernels", action="store_true", help="list those of bars 3 and 4")
    parser.add_argument("--timeline", type=int, default=0, metavar="N", help="profile N cells")
    parser.add_argument("--device", choices=("last", "first", "off"), default="last")
    return parser.parse_args(given)


def main(given: list[str]) -> int:
    arguments = read_arguments(given)
    return report.exit_status("benchmarks.bars", functools.partial(contest.run, arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

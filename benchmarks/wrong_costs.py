"""What ``shape: auto`` loses where costs that were measured at the start are wrong, or right.

    python -m benchmarks.wrong_costs --steps 500 2000 20000 --seeds 20

Nothing is measured: the worlds are those of `tests.support.wrong_costs`. Printed is the tuner's
throughput over that of the best fixed number of nodes, exploration included, between each number of
steps and the one before it: the median and the worst of the seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tests.support.wrong_costs import World, dense, experts, far, qwen, shares

CASES: Mapping[str, Callable[[int], World]] = {
    "8B, 4 requests, right costs": lambda seed: dense("0.6", 4),
    "8B, 16 requests, right costs": lambda seed: dense("1", 16),
    "8B, 64 requests, right costs": lambda seed: dense("0.6", 64),
    "Qwen3.5, 4 requests, right costs": lambda seed: qwen(4, right=True),
    "Qwen3.5, 16 requests, right costs": lambda seed: qwen(16, right=True),
    "experts, 4 requests, right costs": lambda seed: experts("usual", 4),
    "host-bound, 4 requests, right costs": lambda seed: dense("1", 4, 0.25, 4.5),
    "host-bound, 16 requests, right costs": lambda seed: dense("1", 16, 0.25, 4.5),
    "Qwen3.5, 4 requests, as measured": lambda seed: qwen(4, right=False),
    "Qwen3.5, 16 requests, as measured": lambda seed: qwen(16, right=False),
    "8B, 4 requests, contexts of 33k tokens": lambda seed: far(),
    "8B, 4 requests, contexts of 500 and 33k tokens": lambda seed: far(near=True),
    "8B, 4 requests, all nodes alike, contexts of 33k tokens": lambda seed: far(rows=False),
    "8B, 4 requests, all nodes alike, contexts of 500 and 33k tokens": lambda seed: far(
        rows=False, near=True
    ),
    "8B, 4 requests, each times 1 to 4": lambda seed: dense("0.6", 4).times(1, 4, seed),
    "8B, 16 requests, each times 1 to 4": lambda seed: dense("1", 16).times(1, 4, seed),
    "Qwen3.5, 4 requests, each times 1 to 4": lambda seed: qwen(4, right=True).times(1, 4, seed),
    "Qwen3.5, 16 requests, each times 1 to 4": lambda seed: qwen(16, right=True).times(1, 4, seed),
    "experts, 4 requests, each times 1 to 4": lambda seed: experts("usual", 4).times(1, 4, seed),
    "8B, 4 requests, each times 0.5 to 1": lambda seed: dense("0.6", 4).times(0.5, 1, seed),
    "8B, 16 requests, each times 0.5 to 1": lambda seed: dense("1", 16).times(0.5, 1, seed),
    "Qwen3.5, 16 requests, each times 0.5 to 1": lambda seed: qwen(16, right=True).times(
        0.5, 1, seed
    ),
    "8B, 16 requests, all steps longer by half later": lambda seed: replace(
        dense("1", 16), later=1.5
    ),
    "Qwen3.5, 16 requests, all steps longer by half later": lambda seed: replace(
        qwen(16, right=True), later=1.5
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row per case, and a cell per number of steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", default="", help="a part of the names of the cases to print")
    given = parser.parse_args(arguments)
    print("| costs |", *(f"up to {steps} |" for steps in given.steps))
    print("|---|", *("---|" for _ in given.steps))
    for name, make in CASES.items():
        if given.only not in name:
            continue
        found = [shares(make(seed), given.steps, seed) for seed in range(given.seeds)]
        cells = (f"{statistics.median(each):.3f} / {min(each):.3f}" for each in zip(*found))
        print(f"| {name} |", *(f"{cell} |" for cell in cells), flush=True)


if __name__ == "__main__":
    main()

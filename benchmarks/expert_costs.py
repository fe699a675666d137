"""What ``shape: auto`` loses where costs that were measured at the start are wrong about experts.

    python -m benchmarks.expert_costs --steps 200 1000

Nothing is measured: the world is that of `tests.support.moe_world`, in which the tuner is told what
nodes cost times a slope. Printed is its throughput over that of the best fixed number of nodes,
exploration included, as the mean over three texts, each without prompts, with prompts in 30 % of
the steps, and with hiccups of the host.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from tests.support.moe_world import TEXTS, Service, make

TOLD = ((1.0, 15), (0.06, 15), (0.06, 31), (0.4, 31), (2.0, 15))
"""Slopes that are told, and the largest number of nodes."""

SERVICES = ((0.0, 0.0), (0.3, 0.0), (0.0, 0.01))
"""Fractions of steps with prompts, and of steps that a hiccup of the host begins with."""


def ratio(slope: float, largest: int, batch: int, steps: int, *, experts: bool) -> float:
    """Return the mean over texts and services.

    Args:
        slope: by what the costs that are told are wrong.
        largest: the largest number of nodes.
        batch: number of requests.
        steps: how many are served.
        experts: whether the tuner knows that there are experts.
    """
    return statistics.mean(
        Service(text, batch, prompts=prompts, hiccups=hiccups).against_the_best(
            make(largest, slope, experts=experts), steps
        )
        for text in TEXTS
        for prompts, hiccups in SERVICES
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row per slope and number of steps, with costs trusted and corrected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    given = parser.parse_args(arguments)
    print("| slope told, largest tree | steps |", *(f"{batch} |" for batch in given.batch))
    print("|---|---|", *("---|" for _ in given.batch))
    for slope, largest in TOLD:
        for steps in given.steps:
            cells = (
                " / ".join(
                    f"{ratio(slope, largest, batch, steps, experts=experts):.3f}"
                    for experts in (False, True)
                )
                for batch in given.batch
            )
            print(f"| {slope:g}, {largest} nodes | {steps} |", *(f"{cell} |" for cell in cells))


if __name__ == "__main__":
    main()

"""What ``shape: auto`` loses where the host takes longer than the device, as with small models.

    python -m benchmarks.host_bound --part 0.5 0.25 0.12 --host 3 4.5

Nothing is measured: the world is that of `tests.support.closed_loop`, whose device takes a part of
an 8B model's time, and in which a step takes no less than the host does. Printed is the tuner's
throughput over that of the best fixed number of nodes, exploration included, as the mean over two
seeds, with floors and with one excess for all numbers of nodes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from unittest import mock

from tests.support.closed_loop import SmallModel
from vllm_graft.spec_decode.tuning.host_floor import Floor
from vllm_graft.spec_decode.tuning.step_times import StepTimes

TEXTS = ("0", "0.6", "1")


def ratio(model: SmallModel, batch: int, *, floors: bool) -> list[float]:
    """Return one number per text.

    Args:
        model: what is served.
        batch: number of requests.
        floors: whether the tuner looks for the host's time.
    """
    with mock.patch.object(StepTimes, "floor", StepTimes.floor if floors else lambda *_: Floor()):
        return [
            statistics.mean(model.against_the_best(text, batch, seed) for seed in (1, 2))
            for text in TEXTS
        ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row per model, and a cell per batch: one excess / floors, of the worst text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=float, nargs="+", default=[1.0, 0.5, 0.25, 0.12])
    parser.add_argument("--host", type=float, nargs="+", default=[3.0, 4.5])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    given = parser.parse_args(arguments)
    print("| part of an 8B model's time | host, ms |", *(f"{batch} |" for batch in given.batch))
    print("|---|---|", *("---|" for _ in given.batch))
    for part in given.part:
        for host in given.host:
            model = SmallModel(part, host)
            cells = (
                " / ".join(f"{min(ratio(model, batch, floors=on)):.3f}" for on in (False, True))
                for batch in given.batch
            )
            print(f"| {part:g} | {host:g} |", *(f"{cell} |" for cell in cells))


if __name__ == "__main__":
    main()

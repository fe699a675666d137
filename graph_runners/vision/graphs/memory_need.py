"""How much memory a padded graph of a tower takes, by an eager pass over noise."""

from __future__ import annotations

from typing import NamedTuple

from vllm_graft.graph_runners.vision.capture.graph_backend import GraphBackend
from vllm_graft.graph_runners.vision.towers.tower import Tower


class Need(NamedTuple):
    """What a pass of a few rows took; in good approximation it grows with them.

    Attributes:
        rows: of the pass.
        static: bytes of each static buffer.
        peak: bytes that the pass took beyond those in use, its output among them.
    """

    rows: int
    static: list[int]
    peak: int


def need_of(tower: Tower, backend: GraphBackend, rows: int) -> Need | None:
    """Run the eager pass on noise of at most so many rows; None where the tower has none."""
    inputs = tower.sample(rows)
    if inputs is None:
        return None
    items = tower.items(inputs)
    indices = range(len(items))
    tower.eager(inputs, indices)
    _, peak = backend.peak(lambda: tower.eager(inputs, indices))
    static = [value.nbytes for value in tower.constants(items).values()]
    static += [sum(t.nbytes for t in ts) for ts in tower.data(inputs, indices).values()]
    return Need(sum(item.rows for item in items), static, peak)

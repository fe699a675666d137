"""The memory that a graph of a tower needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_graft.graph_runners.vision.capture.graph_backend import GraphBackend
from vllm_graft.graph_runners.vision.graphs.vision_batch import VisionBatch
from vllm_graft.graph_runners.vision.towers.tower import Tower


class MemoryNeed(NamedTuple):
    """Device memory of a pass over so many rows; to a good approximation it grows with them.

    Attributes:
        rows: patches of the pass.
        static: bytes of each static buffer that the graph of such a pass allocates.
        peak: bytes that the pass takes beyond those already in use, its output included.
    """

    rows: int
    static: Sequence[int]
    peak: int

    def scaled(self, rows: int) -> MemoryNeed:
        """The same need for another number of rows."""
        times = rows / self.rows
        return MemoryNeed(rows, [int(times * size) for size in self.static], int(times * self.peak))


def measure_need(tower: Tower, backend: GraphBackend, rows: int) -> MemoryNeed | None:
    """Run eager passes on noise of at most `rows` patches; None if the tower has no noise."""
    inputs = tower.sample(rows)
    if inputs is None:
        return None
    batch = VisionBatch.read(tower, inputs)
    tower.eager(inputs, batch.indices)
    _, peak = backend.peak(lambda: tower.eager(inputs, batch.indices))
    static = [value.nbytes for value in tower.constants(batch.items).values()]
    static += [sum(t.nbytes for t in ts) for ts in tower.data(inputs, batch.indices).values()]
    return MemoryNeed(batch.rows, static, peak)

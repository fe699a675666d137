"""Batches that are larger than any graph: whether it pays to cut them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto

from vllm_graft.graph_runners.vision.capture.rate import TimeShare
from vllm_graft.graph_runners.vision.graphs.embedding_check import disagreement
from vllm_graft.graph_runners.vision.graphs.graph_store import GraphStore
from vllm_graft.graph_runners.vision.graphs.vision_batch import (
    EagerPass,
    Outputs,
    Replay,
    VisionBatch,
)
from vllm_graft.graph_runners.vision.graphs.vision_stats import VitStats
from vllm_graft.graph_runners.vision.replay_plan import SizeClass, size_class


class CutVerdict(Enum):
    """What to do with a batch that is larger than any graph."""

    WHOLE = auto()
    """Leave it whole: cutting does not pay, or that is not known yet."""
    MEASURE = auto()
    """Measure now whether cutting pays."""
    CUT = auto()
    """Cut it: that was measured to be faster."""


class CutGain:
    """Measures per size class whether the replays of a cut batch are faster than one pass.

    A measured batch is answered by the eager pass. Its replays run afterwards, and their time
    counts against the rate as captures do. Ranks that have to agree measure nothing, so they never
    cut. `pays` has what was measured. With `fused_pays`, a pass with fused blocks is faster than
    the eager one.
    """

    fused_pays = False

    def __init__(self, store: GraphStore, stats: VitStats, rate: TimeShare, min_hits: int) -> None:
        self.pays: dict[SizeClass, bool] = {}
        self._store, self._stats, self._rate, self._min_hits = store, stats, rate, min_hits
        self._seen: Counter[SizeClass] = Counter()

    @property
    def fused(self) -> bool:
        """Whether batches that stay whole are answered by a pass with fused blocks."""
        return self.fused_pays and bool(self._store.tower.fused)

    def possible(self, batch: VisionBatch, max_rows: int) -> bool:
        """Whether a batch can be cut into graphs of `max_rows` patches, and its gain measured."""
        several = len(batch.items) > 1 and self._store.rules.timing
        return several and all(item.rows <= max_rows for item in batch.items)

    def verdict(self, batch: VisionBatch, max_rows: int) -> CutVerdict:
        """Decide about a batch of more than `max_rows` patches, and count it."""
        if not self.possible(batch, max_rows):
            return CutVerdict.WHOLE
        size = size_class(batch.items)
        if (pays := self.pays.get(size)) is not None:
            return CutVerdict.CUT if pays else CutVerdict.WHOLE
        self._seen[size] += 1
        due = self._seen[size] >= self._min_hits and self._rate.ready(time.monotonic())
        return CutVerdict.MEASURE if due else CutVerdict.WHOLE

    def measure(self, replays: Sequence[Replay], batch: VisionBatch) -> Outputs:
        """Answer by the eager pass, then compare the replays with it in content and in time."""
        size = size_class(batch.items)
        self.pays[size] = False  # Holds if something below fails, so that it is not tried again.
        eager = self._store.measure(batch, batch.indices)
        start = time.perf_counter()
        self.pays[size] = self._measured_gain(replays, eager)
        seconds = time.perf_counter() - start
        self._rate.spent(seconds)
        self._stats.capture_seconds += seconds
        return eager.outputs

    def _measured_gain(self, replays: Sequence[Replay], eager: EagerPass) -> bool:
        batch, timed = eager.batch, self._store.backend.timed
        found, seconds = timed(lambda: self._store.run(replays, batch))
        if found is None:
            return False
        wrong = disagreement(found, eager.outputs)
        if wrong and self._store.rules.verify:
            cause = f"a batch of {len(batch.items)} items that was cut: {wrong}"
            self._stats.fail(cause, "vision graphs: %s; such batches are not cut")
            return False
        del found
        # The first run may have allocated segments for its outputs; the second one finds them.
        seconds = min(seconds, timed(lambda: self._store.run(replays, batch))[1])
        return self._store.pays(seconds, eager) and seconds <= self._fused_seconds(batch)

    def _fused_seconds(self, batch: VisionBatch) -> float:
        if not self.fused:
            return math.inf
        tower = self._store.tower
        return self._store.backend.timed(lambda: tower.eager_fused(batch.inputs, batch.indices))[1]

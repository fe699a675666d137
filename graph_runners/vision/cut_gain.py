"""Batches of several items that are larger than any graph: whether it pays to cut them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from vllm_graft.base.log import logger
from vllm_graft.graph_runners.vision.graphs.embedding_check import disagreement
from vllm_graft.graph_runners.vision.capture.rate import Rate
from vllm_graft.graph_runners.vision.graphs.graph_store import GraphStore
from vllm_graft.graph_runners.vision.replay_plan import SizeClass, size_class
from vllm_graft.graph_runners.vision.towers.tower import Inputs, Item
from vllm_graft.graph_runners.vision.graphs.vision_stats import VitStats

if TYPE_CHECKING:
    import torch

Outputs = list["torch.Tensor"]


class CutGain:
    """Measures, a class of sizes, whether the graphs of a cut batch are faster than a pass.

    A batch that was measured is answered by the eager pass; the replays come after it, and count
    as captures do against the rate. Ranks that have to agree never measure, so they never cut.

    Attributes:
        pays: what was found.
        fused_pays: whether a pass with fused blocks was found to be faster than the eager one.
    """

    fused_pays = False

    def __init__(self, store: GraphStore, stats: VitStats, rate: Rate, min_hits: int) -> None:
        self.pays: dict[SizeClass, bool] = {}
        self._store, self._stats, self._rate, self._min_hits = store, stats, rate, min_hits
        self._seen: Counter[SizeClass] = Counter()

    @property
    def fused(self) -> bool:
        """Whether batches that are not cut are answered by a pass with fused blocks."""
        return self.fused_pays and bool(self._store.tower.fused)

    def possible(self, items: Sequence[Item], max_rows: int) -> bool:
        """Whether such a batch can be cut, and its gain measured."""
        several = len(items) > 1 and self._store.timing
        return several and all(item.rows <= max_rows for item in items)

    def verdict(self, items: Sequence[Item], max_rows: int) -> Literal["eager", "measure", "cut"]:
        """What to do with a batch of more than `max_rows` rows; counts it. Takes microseconds."""
        if not self.possible(items, max_rows):
            return "eager"
        size = size_class(items)
        if (pays := self.pays.get(size)) is not None:
            return "cut" if pays else "eager"
        self._seen[size] += 1
        due = self._seen[size] >= self._min_hits and self._rate.ready(time.monotonic())
        return "measure" if due else "eager"

    def measure(
        self, inputs: Inputs, items: Sequence[Item], replay: Callable[[], Outputs | None]
    ) -> Outputs:
        """The eager answer; what `replay` gives is compared with it in content and in time."""
        size = size_class(items)
        self.pays[size] = False  # Whatever fails below is not tried again.
        eager = self._store.measure(inputs, range(len(items)))
        start = time.perf_counter()
        found, ours = self._store.backend.timed(replay)
        wrong = disagreement(found, eager.outputs) if found is not None else None
        if wrong and self._store.verify:
            cause = f"a batch of {len(items)} items that was cut: {wrong}"
            self._stats.fail(cause)
            logger.warning("vision graphs: %s; such batches are not cut", cause)
        elif found is not None:
            del found
            # The first replay may have made the segments of its groups; later ones find them.
            ours = min(ours, self._store.backend.timed(replay)[1])
            pays = self._store.pays(ours, eager, inputs, range(len(items)))
            self.pays[size] = pays and ours <= self._fused_seconds(inputs, len(items))
        seconds = time.perf_counter() - start
        self._rate.spent(seconds)
        self._stats.capture_seconds += seconds
        return eager.outputs

    def _fused_seconds(self, inputs: Inputs, num_items: int) -> float:
        if not self.fused:
            return math.inf
        tower = self._store.tower
        return self._store.backend.timed(lambda: tower.eager_fused(inputs, range(num_items)))[1]

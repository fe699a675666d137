"""Captures of exact graphs, and what happens when one fails."""

import time

from vllm_graft.graph_runners.vision.capture.admission import Admission, TimeShare
from vllm_graft.graph_runners.vision.graphs.graph_store import GraphStore
from vllm_graft.graph_runners.vision.graphs.vision_batch import (
    EagerPass,
    ExactReplay,
    LayoutKey,
    VisionBatch,
)
from vllm_graft.graph_runners.vision.graphs.vision_stats import Reason, VitStats

_PASSING: tuple[Reason, ...] = ("no_room", "memory", "bits")
"""Refusals for now: other graphs may go and leave room, and the next capture fuses nothing."""


class ExactCaptures:
    """Captures exact graphs; a failure costs its layout the graph, but no batch its answer."""

    def __init__(
        self, store: GraphStore, admission: Admission[LayoutKey], rate: TimeShare, stats: VitStats
    ) -> None:
        self._store, self._admission, self._rate, self._stats = store, admission, rate, stats

    def capture_due(
        self, group: ExactReplay | None, batch: VisionBatch, eager: EagerPass | None = None
    ) -> None:
        """Capture a group, if any, while the engine serves: the time counts against the rate."""
        if group is None:
            return
        start = time.perf_counter()
        self.capture(group, batch, eager)
        seconds = time.perf_counter() - start
        self._rate.spent(seconds)
        self._stats.capture_seconds += seconds

    def capture(
        self, group: ExactReplay, batch: VisionBatch, eager: EagerPass | None = None
    ) -> None:
        """Capture the graph of a group; a failure is counted, and its key is refused. `eager` is
        the eager pass over the items of the group, if there was one."""
        try:
            why = self._store.capture_exact(group, batch, eager)
        except Exception as error:
            why = "error"
            cause = f"{group.key}: {type(error).__name__}: {error}"
            self._stats.fail(cause, "vision graph was not captured: %s")
        if why is None:
            self._stats.captures["exact"] += 1
            return
        self._stats.dropped[why] += 1
        self._admission.refuse(group.key, why, for_now=why in _PASSING)

"""Which way a batch goes: the decision, which the runner carries out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from vllm_graft.graph_runners.vision import replay_plan
from vllm_graft.graph_runners.vision.capture.admission import Admission, TimeShare
from vllm_graft.graph_runners.vision.captures import StartupCaptures
from vllm_graft.graph_runners.vision.graphs.graph_store import GraphStore
from vllm_graft.graph_runners.vision.graphs.vision_batch import (
    ExactReplay,
    LayoutKey,
    Replay,
    VisionBatch,
)
from vllm_graft.graph_runners.vision.graphs.vision_metrics import Reason


class Answer(Enum):
    """What computes the embeddings of a batch."""

    REPLAY = auto()
    """Exact and padded graphs."""
    CAPTURE = auto()
    """The eager pass, from which the exact graph of the whole batch is then captured."""
    FUSED = auto()
    """The model's pass with fused blocks and no graph."""
    DECLINE = auto()
    """The engine's own path."""


@dataclass(frozen=True)
class Route:
    """The way of one batch. `replays`: the graphs for `REPLAY`; together they hold each item once.
    `due`: a group whose exact graph is captured once the batch is answered. `reason`: the word that
    a declined batch is counted by."""

    answer: Answer
    replays: Sequence[Replay] = ()
    due: ExactReplay | None = None
    reason: Reason = ""


class Router:
    """Decides the way of each batch; a padded graph takes at most `max_items` items."""

    def __init__(
        self,
        store: GraphStore,
        admission: Admission[LayoutKey],
        rate: TimeShare,
        startup: StartupCaptures,
        max_items: int,
    ) -> None:
        self.rate = rate
        self._store, self._admission, self._startup = store, admission, startup
        self._max_items = max_items

    @property
    def fused(self) -> bool:
        """Whether batches that are larger than any graph take a pass with fused blocks."""
        return self._startup.fused_pays and bool(self._store.tower.fused)

    def route(self, batch: VisionBatch) -> Route:
        """Decide about a batch, and count its layouts."""
        if batch.rows > self._startup.max_rows:
            return Route(Answer.FUSED) if self.fused else Route(Answer.DECLINE, reason="too_large")
        groups = replay_plan.groups(batch.items, self._startup.max_rows)
        self._admission.see(group.key for group in groups)
        if any(self._admission.refused.get(group.key) == "no_gain" for group in groups):
            # A padded graph would be slower still than the exact one that was refused.
            return Route(Answer.DECLINE, reason="no_gain")
        buckets = sorted(self._store.buckets)
        replays = replay_plan.choose(
            batch.items, groups, self._store.exact, buckets, self._max_items
        )
        due = self._due(groups)
        if due is not None and len(due.indices) == len(batch.items):
            # The eager pass over the batch is needed to capture it, so it is also the answer.
            return Route(Answer.CAPTURE, due=due)
        if replays is None:
            return Route(Answer.DECLINE, due=due, reason="no_graph")
        return Route(Answer.REPLAY, replays, due)

    def _due(self, groups: Sequence[ExactReplay]) -> ExactReplay | None:
        """The first group whose exact graph should be captured now."""
        live = self._store.exact
        for group in groups:
            if group.key in live or not self._admission.wants(group.key):
                continue
            if not self.rate.ready(time.monotonic()):
                return None
            if self.rate.plenty or self._admission.is_hottest(group.key, live):
                return group
        return None

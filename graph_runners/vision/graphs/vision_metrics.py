"""What vision graphs count, on the rank that encodes: for ``graft_info()`` and ``/metrics``."""

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm_graft.base.log import logger
from vllm_graft.base.metric import Kind, Metric, Origin, PartMetrics

Reason = str
"""A word to count by: why a batch was declined, or why a graph was not kept."""


@dataclass
class VitStats:
    """Counters since the runner was built: images and videos by what served them (exact, bucket,
    fused, eager), replays and captures by kind of graph, declined batches and dropped graphs by
    reason, the latest failures, patches of replayed padded graphs without and with padding, and
    wall seconds of captures and measurements while serving."""

    items: Counter[str] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)
    declines: Counter[str] = field(default_factory=Counter)
    captures: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    rows: int = 0
    padded_rows: int = 0
    capture_seconds: float = 0.0

    def fail(self, cause: str, warning: str = "") -> None:
        """Keep the cause with the latest few, and log it in a warning if there is one."""
        self.failures = [*self.failures[-7:], cause]
        if warning:
            logger.warning(warning, cause)

    def report(self) -> dict[str, Any]:
        plain = {
            name: dict(found) if isinstance(found, Counter) else found
            for name, found in vars(self).items()
        }
        return {**plain, "capture_seconds": round(self.capture_seconds, 6)}


TIERS = ("exact", "bucket", "fused", "eager")
GRAPHS = ("exact", "bucket")

_row = functools.partial(Metric, origin=Origin.ENCODER)
_C, _G = Kind.COUNTER, Kind.GAUGE

# fmt: off
METRICS = PartMetrics((
    _row("items", _C, "Images and videos, by what encoded them: an exact graph, a padded one (bucket), fused blocks without a graph, or the model's own pass (eager).", label="tier", values=TIERS),
    _row("replays", _C, "Replays of graphs, by their kind.", label="kind", values=GRAPHS),
    _row("declines", _C, "Batches that were left to vLLM's own path, by reason.", label="reason", values=("no_graph", "too_large", "error")),
    _row("captures", _C, "Graphs that were captured and kept, by their kind.", label="kind", values=GRAPHS),
    _row("dropped_graphs", _C, "Graphs that were not kept, by reason.", label="reason", values=("evicted",)),
    _row("capture_seconds", _C, "Time that captures and measurements took while the engine served, in seconds."),
    _row("patches", _C, "Patches of the items in replays of padded graphs."),
    _row("padding_patches", _C, "Patches of padding in these replays."),
    _row("graphs", _G, "Graphs that are captured now, by their kind.", label="kind", values=GRAPHS),
    _row("memory_bytes", _G, "Device memory that the graphs take."),
    _row("memory_limit_bytes", _G, "Device memory that the graphs may take."),
))
# fmt: on

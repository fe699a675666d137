"""What vision graphs count for ``/metrics``, on the rank that encodes."""

import functools

from vllm_graft.base.metric import Kind, Metric, Origin, PartMetrics

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

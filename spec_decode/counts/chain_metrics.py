"""What graphs of a standalone draft model count for ``/metrics``."""

from __future__ import annotations

from vllm_graft.base.metric import Kind, Metric, PartMetrics

_C = Kind.COUNTER

# fmt: off
METRICS = PartMetrics((
    Metric("loop_replays", _C, "Loops over the second to the last draft that ran as one CUDA graph."),
    Metric("loop_launches", _C, "Loops that were launched step by step, by reason: there are no graphs (as during warm-up), or none fits the batch.", label="reason", values=("uncaptured", "no_fit")),
    Metric("first_pass_replays", _C, "First passes of the draft, over what was accepted, that ran as one CUDA graph."),
    Metric("first_pass_launches", _C, "First passes that were launched, most often because prompts are in the batch."),
    Metric("padding_requests", _C, "Padding in the replays of loops, in requests."),
    Metric("graphs", Kind.GAUGE, "Captured graphs, by the pass that they hold.", label="of", values=("first_pass", "loop")),
))
# fmt: on

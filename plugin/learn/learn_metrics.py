"""What the part counts for ``/metrics``."""

from typing import Protocol
from weakref import WeakValueDictionary

from vllm_graft.base.metric import Kind, Metric, Numbers, Origin, PartMetrics

LEFT_OUT = ("salted", "adapter", "not_text", "long", "behind", "failed")
"""Why requests were not recorded: they have a ``cache_salt``; they are an adapter's; their prompt
is not of token ids alone; they do not fit into a segment; the thread was behind; writing failed."""

_C, _G, _ENGINE = Kind.COUNTER, Kind.GAUGE, Origin.ENGINE

# fmt: off
ROWS = (
    Metric("recorded_requests", _C, "Finished requests that were recorded.", origin=_ENGINE),
    Metric("recorded_tokens", _C, "Tokens of these, prompts and answers.", origin=_ENGINE),
    Metric("left_out_requests", _C, "Finished requests that were not recorded, by reason.", origin=_ENGINE, label="reason", values=LEFT_OUT),
    Metric("head", _G, "Number of the published head that drafts; 0: that of the start (graft.learn.follow).", origin=_ENGINE),
    Metric("head_trained_seconds", _G, "Seconds of training since the head of the start.", origin=_ENGINE),
    Metric("head_swaps", _C, "Heads that were swapped in while serving.", origin=_ENGINE),
    Metric("head_rollbacks", _C, "How many of them yielded less and were swapped out again.", origin=_ENGINE),
    Metric("unfit_heads", _C, "Published heads that can't be read or don't fit, and were not swapped in.", origin=_ENGINE),
    Metric("head_yield_before", _G, "Tokens per tree before the last swap.", origin=_ENGINE),
    Metric("head_yield", _G, "Tokens per tree since then, over the last graft.learn.follow_trees trees.", origin=_ENGINE),
)
# fmt: on


class Counting(Protocol):
    """Whoever counts some of the rows."""

    def numbers(self) -> Numbers: ...


CURRENT = WeakValueDictionary[str, Counting]()
"""Who records, and who follows, for the engine that this process has built last. Its scheduler has
them, and they have all of it."""


class _Watch:
    def step(self, stats: object) -> None:
        """Nothing of it is counted."""

    def numbers(self) -> Numbers:
        counting = [*CURRENT.values()]
        return {name: found for each in counting for name, found in each.numbers().items()}


METRICS = PartMetrics(ROWS, watch=_Watch)

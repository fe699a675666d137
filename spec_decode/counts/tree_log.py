"""VLLM's log line on drafts and its counters of accepted ones by position, for trees."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import prometheus_client
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm, logger


class TreeLogging(SpecDecodingLogging):
    """Says what trees yield per depth, where vLLM's line divides by all nodes. Only one path of a
    tree can be accepted: 6 of 63 nodes would read as a rate of 9.5 %."""

    def log(self, log_fn: Any = logger.info) -> None:
        """Log what was observed since the last line, if anything was, and begin anew."""
        if not self.num_drafts:
            return
        trees = int(np.sum(self.num_drafts))
        nodes, accepted = int(np.sum(self.num_draft_tokens)), int(np.sum(self.num_accepted_tokens))
        by_depth = np.trim_zeros(np.sum(self.accepted_tokens_per_pos_lists, axis=0), "b") / trees
        seconds = max(time.monotonic() - self.last_log_time, 1e-9)
        log_fn(
            "SpecDecoding metrics: "
            "Mean acceptance length: %.2f, "
            "Accepted throughput: %.2f tokens/s, "
            "Trees: %d, "
            "Nodes per tree: %.1f, "
            "Accepted: %d tokens, "
            "Per-depth acceptance rate: %s",
            1 + accepted / trees,
            accepted / seconds,
            trees,
            nodes / trees,
            accepted,
            ", ".join(f"{rate:.3f}" for rate in by_depth) or "none",
        )
        self.reset()


class LateCounter:
    """A counter whose series begins when it first counts something."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def inc(self, amount: float = 1) -> None:
        if amount:
            # The metric's own table returns the same series again.
            self._make().inc(amount)


def show_depths(prom: SpecDecodingProm, depth: int) -> None:
    """Leave out positions below `depth` levels of a tree until a node there is accepted. N-grams
    may lead deeper than the draft. Ray's metrics stay as they are, as do those that several API
    servers keep in files, from which a series can't be removed."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return
    for counters in getattr(prom, "counter_spec_decode_num_accepted_tokens_per_pos", {}).values():
        for place in range(depth, len(counters)):
            child = counters[place]
            if not isinstance(child, prometheus_client.Counter):
                return
            metric: Any = prometheus_client.REGISTRY._names_to_collectors[child._name]
            metric.remove(*child._labelvalues)
            counters[place] = LateCounter(partial(metric.labels, *child._labelvalues))

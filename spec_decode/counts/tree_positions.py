"""vLLM's counters of accepted drafts by position, of which it has one for each node of a tree."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import prometheus_client

if TYPE_CHECKING:
    from vllm.v1.spec_decode.metrics import SpecDecodingProm


class LateCounter:
    """A counter whose series begins when it first counts something."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def inc(self, amount: float = 1) -> None:
        if amount:
            # The metric's own table returns the same series again.
            self._make().inc(amount)


def show_depths(prom: SpecDecodingProm, depth: int) -> None:
    """Leave out positions below `depth` levels of a tree until a node there is accepted.

    N-grams may lead deeper than the draft. Ray's metrics stay as they are, as do those that several
    API servers keep in files, from which a series can't be removed.
    """
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

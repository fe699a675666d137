"""vLLM's log line on drafts, for trees."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, logger


class TreeLogging(SpecDecodingLogging):
    """Says what trees yield per depth, where vLLM's line divides by all nodes.

    Only one path of a tree can be accepted: 6 of 63 nodes would read as a rate of 9.5 %.
    """

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

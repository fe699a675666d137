"""The eviction policy ``lfu``."""

from __future__ import annotations

from vllm_graft.hicache.host.policies.priority import Page, PriorityPolicy


class LfuPolicy(PriorityPolicy):
    """Evicts the least frequently used page, with dynamic ageing (LFU-DA)."""

    def worth(self, page: Page) -> float:
        """The number of uses."""
        return page.uses

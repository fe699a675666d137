"""Fewest recompute seconds saved a byte."""

from __future__ import annotations

from vllm_graft.hicache.host.policies.priority import Page, PriorityPolicy


class CostAwarePolicy(PriorityPolicy):
    """Evicts the page whose bytes save the fewest seconds of recomputation, with ageing.

    GreedyDual-Size-Frequency (Cherkasova, HPL-98-69, 1998): uses x cost / size. A page of a long
    prefix costs more to recompute than an early one, a sliding-window or Mamba page has another
    size than one of full attention: where costs and sizes are all alike, this is LFU with ageing.
    """

    def worth(self, page: Page) -> float:
        """Seconds saved a byte, times uses."""
        return page.uses * page.cost / page.size

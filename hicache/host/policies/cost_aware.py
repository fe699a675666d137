"""The eviction policy ``cost_aware``."""

from __future__ import annotations

from vllm_graft.hicache.host.policies.priority import Page, PriorityPolicy


class CostAwarePolicy(PriorityPolicy):
    """Evicts the page that saves the fewest seconds of recomputation per byte, with ageing.

    The algorithm is GreedyDual-Size-Frequency (Cherkasova, HPL-98-69, 1998): a page is worth
    uses x cost / size. A page late in a long prefix costs more to recompute than an early one, and
    pages of sliding windows or Mamba have other sizes than those of full attention. If all costs
    and sizes are equal, this is LFU with ageing.
    """

    def worth(self, page: Page) -> float:
        """Seconds of recomputation per byte, times uses."""
        return page.uses * page.cost / page.size

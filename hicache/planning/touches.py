"""Counts how often prefixes were requested, for the policy ``write_through_selective``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from vllm_graft.hicache.pages.page_key import PageKey


class TouchCounter:
    """Counts requests for each page.

    Args:
        capacity: most keys that are counted. Beyond it, the keys unused longest are forgotten.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[PageKey, int] = OrderedDict()

    def add(self, keys: Iterable[PageKey]) -> None:
        """Count one request for each of these pages."""
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1
            self._counts.move_to_end(key)
        while len(self._counts) > self._capacity:
            self._counts.popitem(last=False)

    def count(self, key: PageKey) -> int:
        """Number of requests for the page."""
        return self._counts.get(key, 0)

    def clear(self) -> None:
        """Forget all counts."""
        self._counts.clear()

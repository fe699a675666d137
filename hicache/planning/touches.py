"""How often prefixes were asked for, for the admission of ``write_through_selective``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from vllm_graft.hicache.pages.page_key import PageKey


class TouchCounter:
    """Counts requests by page key; the keys seen longest ago are forgotten beyond ``capacity``."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: OrderedDict[PageKey, int] = OrderedDict()

    def add(self, keys: Iterable[PageKey]) -> None:
        """A request has asked for these pages."""
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1
            self._counts.move_to_end(key)
        while len(self._counts) > self._capacity:
            self._counts.popitem(last=False)

    def count(self, key: PageKey) -> int:
        """Requests that have asked for the page."""
        return self._counts.get(key, 0)

    def clear(self) -> None:
        """Forget everything."""
        self._counts.clear()

"""The base of eviction policies that give each page a priority and age: a heap."""

from __future__ import annotations

import heapq
import itertools
from abc import abstractmethod
from dataclasses import dataclass

from vllm_graft.hicache.host.eviction import EvictionPolicy, IsProtected, Key


@dataclass
class Page:
    """A page in the pool.

    Attributes:
        cost: seconds that recomputing the page takes.
        size: bytes of the page.
        uses: number of insertions and touches.
        priority: the page with the smallest priority is evicted first.
        order: number of the page's valid heap entry, larger for later ones. Other entries of the
            page are stale.
    """

    cost: float
    size: int
    uses: int = 0
    priority: float = 0.0
    order: int = 0


class PriorityPolicy(EvictionPolicy):
    """Evicts the page of smallest priority, and the oldest page among equals.

    The priority of a page is set to ``age + worth(page)`` at each use, and ``age`` is the priority
    of the last page that was evicted. So a page that was valuable once, but is no longer used, is
    evicted after enough other pages have passed through the pool. This is dynamic ageing: Arlitt et
    al., "Evaluating Content Management Techniques for Web Proxy Caches", 2000.

    A use costs O(log pages). An eviction costs that for each evicted page, and for each protected
    page that it meets.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._pages: dict[Key, Page] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = itertools.count(1)
        self._age = 0.0

    @abstractmethod
    def worth(self, page: Page) -> float:
        """The value of keeping ``page``, at least 0; ``page.uses`` is at least 1."""

    def insert(self, key: Key, cost: float, size: int) -> None:
        """Add ``key``, or count a use of it with a new cost and size."""
        page = self._pages.setdefault(key, Page(cost, size))
        page.cost, page.size = cost, size
        self._use(key, page)

    def touch(self, key: Key) -> None:
        """Count a use of ``key``."""
        if (page := self._pages.get(key)) is not None:
            self._use(key, page)

    def refresh(self, key: Key) -> None:
        """Make ``key`` the most recent key of its priority."""
        if (page := self._pages.get(key)) is not None:
            self._push(key, page)

    def remove(self, key: Key) -> None:
        """Forget ``key``."""
        self._pages.pop(key, None)

    def evict(self, n: int, is_protected: IsProtected) -> list[Key] | None:
        """Evict the ``n`` pages of smallest priority."""
        victims: list[tuple[float, int, Key]] = []
        passed: list[tuple[float, int, Key]] = []
        while self._heap and len(victims) < n:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                (passed if is_protected(entry[2]) else victims).append(entry)
        enough = len(victims) == n
        for entry in passed if enough else passed + victims:
            heapq.heappush(self._heap, entry)
        if not enough:
            return None
        for priority, _, key in victims:
            del self._pages[key]
            self._age = max(self._age, priority)
        return [key for _, _, key in victims]

    def clear(self) -> None:
        """Forget every page and the age."""
        self._pages.clear()
        self._heap.clear()
        self._age = 0.0

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: object) -> bool:
        return key in self._pages

    def _use(self, key: Key, page: Page) -> None:
        page.uses += 1
        page.priority = self._age + self.worth(page)
        self._push(key, page)

    def _push(self, key: Key, page: Page) -> None:
        page.order = next(self._order)
        heapq.heappush(self._heap, (page.priority, page.order, key))
        # Stale entries are dropped once they are the majority, at constant cost per use.
        if len(self._heap) > 2 * len(self._pages) + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[float, int, Key]) -> bool:
        page = self._pages.get(entry[2])
        return page is not None and page.order == entry[1]

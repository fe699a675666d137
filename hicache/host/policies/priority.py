"""Policies that evict the page with the smallest number, and age: a heap with stale entries."""

from __future__ import annotations

import heapq
import itertools
from abc import abstractmethod
from dataclasses import dataclass

from vllm_graft.hicache.host.eviction import EvictionPolicy, IsProtected, Key


@dataclass
class Page:
    """What is known of a page in the pool.

    Attributes:
        cost: seconds that recomputing it takes.
        size: bytes.
        uses: insertions and touches.
        priority: the smallest leaves first.
        order: unique, larger is more recent; the heap entry with another order is stale.
    """

    cost: float
    size: int
    uses: int = 0
    priority: float = 0.0
    order: int = 0


class PriorityPolicy(EvictionPolicy):
    """Evicts the page of smallest priority, the oldest one of equals.

    A page's priority is ``age + worth(page)``, set when it is used; ``age`` is the priority of the
    last page that was evicted. So what was worth much once, and is used no more, leaves when enough
    has passed through the pool (dynamic ageing: Arlitt et al., "Evaluating Content Management
    Techniques for Web Proxy Caches", 2000). O(log pages) a use; eviction also pays that for each
    protected page which it meets.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._pages: dict[Key, Page] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = itertools.count(1)
        self._age = 0.0

    @abstractmethod
    def worth(self, page: Page) -> float:
        """What keeping ``page`` is worth, at least 0; ``page.uses`` is at least 1."""

    def insert(self, key: Key, cost: float, size: int) -> None:
        """Add ``key``, or use it with a new cost and size."""
        page = self._pages.setdefault(key, Page(cost, size))
        page.cost, page.size = cost, size
        self._use(key, page)

    def touch(self, key: Key) -> None:
        """Count a use of ``key``."""
        if (page := self._pages.get(key)) is not None:
            self._use(key, page)

    def refresh(self, key: Key) -> None:
        """Make ``key`` the most recent one of those with its priority."""
        if (page := self._pages.get(key)) is not None:
            self._push(key, page)

    def remove(self, key: Key) -> None:
        """Forget ``key``."""
        self._pages.pop(key, None)

    def evict(self, n: int, is_protected: IsProtected) -> list[Key] | None:
        """Take the ``n`` pages of smallest priority out."""
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
        # Stale entries are dropped when they are most of the heap: constant cost a use.
        if len(self._heap) > 2 * len(self._pages) + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[float, int, Key]) -> bool:
        page = self._pages.get(entry[2])
        return page is not None and page.order == entry[1]

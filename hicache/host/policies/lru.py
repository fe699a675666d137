"""The eviction policy ``lru``."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from vllm_graft.hicache.host.eviction import EvictionPolicy, IsProtected, Key


class LruPolicy(EvictionPolicy):
    """Evicts the least recently used page. Cost and size do not count."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, cost: float, size: int) -> None:
        """Add ``key`` as the most recently used."""
        self._order[key] = None
        self._order.move_to_end(key)

    def touch(self, key: Key) -> None:
        """Make ``key`` the most recently used."""
        if key in self._order:
            self._order.move_to_end(key)

    def refresh(self, key: Key) -> None:
        """Make ``key`` the most recently used."""
        self.touch(key)

    def remove(self, key: Key) -> None:
        """Forget ``key``."""
        self._order.pop(key, None)

    def evict(self, n: int, is_protected: IsProtected) -> list[Key] | None:
        """Evict the ``n`` least recently used keys."""
        victims = list(islice((key for key in self._order if not is_protected(key)), n))
        if len(victims) < n:
            return None
        for key in victims:
            del self._order[key]
        return victims

    def clear(self) -> None:
        """Forget every key."""
        self._order.clear()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order

"""The interface of eviction policies of the host pool.

The pool owns slots and reference counts, and a policy only orders keys. Only the scheduler's thread
calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable

Key = Hashable
"""The name of a page in the host pool. Policies only hash it and compare it for equality."""

IsProtected = Callable[[Key], bool]
"""Says whether a key must not be evicted now, because a copy or a write needs its slot."""


class EvictionPolicy(ABC):
    """Chooses the pages that leave the host pool.

    Args:
        capacity: number of pages that the pool can hold, at least 1. A policy may use it to limit
            how many evicted keys it remembers. It need not enforce it.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity

    @abstractmethod
    def insert(self, key: Key, cost: float, size: int) -> None:
        """Add a page that entered the pool, or update it if its key is known.

        Args:
            key: key of the page.
            cost: seconds that recomputing the page would take, at least 0.
            size: bytes of the page, at least 1.
        """

    @abstractmethod
    def touch(self, key: Key) -> None:
        """Count a use of a page. A key that is not in the pool may be remembered, but not added."""

    def refresh(self, key: Key) -> None:
        """Make ``key`` recent without counting a use.

        Pages of a request are stored head first. When the request ends, they are refreshed tail
        first, so that the tail of the prefix is evicted before the head. Without the head the tail
        is useless.
        """
        return

    @abstractmethod
    def remove(self, key: Key) -> None:
        """Forget a page that left the pool without :meth:`evict`. Unknown keys are ignored."""

    @abstractmethod
    def evict(self, n: int, is_protected: IsProtected) -> list[Key] | None:
        """Remove the ``n`` least valuable pages.

        Args:
            n: number of pages to remove.
            is_protected: says which pages must stay.

        Returns:
            ``n`` distinct keys, none of them protected, the least valuable first. None, with
            nothing changed, if fewer than ``n`` pages are not protected.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all keys, and everything that was learned from their use."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of pages in the pool, as the policy knows them."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether ``key`` is in the pool."""

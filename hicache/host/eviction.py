"""What an eviction policy of the host pool has to do.

The pool owns slots and reference counts; a policy only orders keys. It is called by one thread
(the scheduler's) and keeps no bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable

Key = Hashable
"""What names a page in the host pool; the policy only hashes and compares it."""

IsProtected = Callable[[Key], bool]
"""Whether a key may not be evicted now (it is being copied, or was just matched)."""


class EvictionPolicy(ABC):
    """Picks the pages that leave the host pool.

    Args:
        capacity: pages that the pool holds, at least 1. Policies size their memory of evicted
            keys by it; they don't enforce it.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity

    @abstractmethod
    def insert(self, key: Key, cost: float, size: int) -> None:
        """A page entered the pool. Inserting a key that is there updates it.

        Args:
            key: which page.
            cost: seconds that recomputing the page would take, at least 0.
            size: bytes of the page, at least 1.
        """

    @abstractmethod
    def touch(self, key: Key) -> None:
        """A page was used. A key that is not in the pool may be remembered, never added."""

    def refresh(self, key: Key) -> None:
        """Make ``key`` recent without counting a use.

        A request's pages are stored head first; refreshing them tail first when it ends makes the
        tail of its prefix leave before the head, without which the tail is of no use.
        """
        return

    @abstractmethod
    def remove(self, key: Key) -> None:
        """A page left the pool for another reason than :meth:`evict`; nothing if unknown."""

    @abstractmethod
    def evict(self, n: int, is_protected: IsProtected) -> list[Key] | None:
        """Take the ``n`` pages out that are worth least, worst first.

        Returns:
            ``n`` distinct keys, none of them protected; they are no longer in the policy. None if
            fewer than ``n`` may go: then nothing has changed.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, also what was learned."""

    @abstractmethod
    def __len__(self) -> int:
        """Pages that the policy holds."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether ``key`` is in the pool."""

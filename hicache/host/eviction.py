"""Eviction policies of the host pool: their interface, ``lru`` and ``arc``.

The pool owns slots and reference counts, and a policy only orders keys. Only the scheduler's thread
calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import islice

Key = Hashable
"""The name of a page in the host pool. Policies only hash it and compare it for equality."""

IsProtected = Callable[[Key], bool]
"""Says whether a key must not be evicted now, because a copy or a write needs its slot."""


class EvictionPolicy(ABC):
    """Chooses the pages that leave the host pool.

    The pool can hold ``capacity`` pages. A policy may use it to limit how many evicted keys it
    remembers. It need not enforce it.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity

    @abstractmethod
    def insert(self, key: Key, cost: float, size: int) -> None:
        """Add a page of ``size`` bytes that entered the pool, or update it if its key is known.

        ``cost`` is the seconds that recomputing it would take.
        """

    @abstractmethod
    def touch(self, key: Key) -> None:
        """Count a use of a page. A key that is not in the pool may be remembered, but not added."""

    def refresh(self, key: Key) -> None:  # noqa: B027
        """Make ``key`` recent without counting a use.

        Pages of a request are stored head first. When it ends, they are refreshed tail first, so
        that the tail, which is useless without the head, is evicted first.
        """

    @abstractmethod
    def remove(self, key: Key) -> None:
        """Forget a page that left the pool without :meth:`evict`. Unknown keys are ignored."""

    @abstractmethod
    def evict(self, n: int, is_protected: IsProtected) -> list[Key] | None:
        """Remove the ``n`` least valuable pages.

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
    def __contains__(self, key: object) -> bool: ...


class LruPolicy(EvictionPolicy):
    """Evicts the least recently used page. Cost and size do not count."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key, cost: float, size: int) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def touch(self, key: Key) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def refresh(self, key: Key) -> None:
        self.touch(key)

    def remove(self, key: Key) -> None:
        self._order.pop(key, None)

    def evict(self, n: int, is_protected: IsProtected) -> list[Key] | None:
        victims = list(islice((key for key in self._order if not is_protected(key)), n))
        if len(victims) < n:
            return None
        for key in victims:
            del self._order[key]
        return victims

    def clear(self) -> None:
        self._order.clear()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order


Keys = OrderedDict[Key, None]


class ArcPolicy(EvictionPolicy):
    """Adaptive replacement (ARC): balances recency against frequency.

    Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
    Pages that were used once are in the part ``once``, all others in ``often``. Each part has a
    list of keys that were evicted from it. If such a key comes back, its part was too small, and
    the target moves.

    Two things differ from the paper. The pool decides when and how many pages leave. And pages may
    be protected: if the part that should give up a page has no unprotected one, the other part
    gives up one. Cost and size do not count.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: Keys = OrderedDict()
        self._often: Keys = OrderedDict()
        self._gone_once: Keys = OrderedDict()
        self._gone_often: Keys = OrderedDict()
        self.target = 0.0
        """Number of pages that ``once`` should hold."""

    def insert(self, key: Key, cost: float, size: int) -> None:
        """Add ``key``. A key that was evicted recently counts as used before."""
        if key in self:
            self.touch(key)
        elif key in self._gone_once:
            step = max(1.0, len(self._gone_often) / len(self._gone_once))
            self.target = min(self.target + step, self.capacity)
            del self._gone_once[key]
            self._often[key] = None
        elif key in self._gone_often:
            step = max(1.0, len(self._gone_once) / len(self._gone_often))
            self.target = max(self.target - step, 0.0)
            del self._gone_often[key]
            self._often[key] = None
        else:
            self._once[key] = None

    def touch(self, key: Key) -> None:
        if key in self._once:
            del self._once[key]
            self._often[key] = None
        elif key in self._often:
            self._often.move_to_end(key)

    def refresh(self, key: Key) -> None:
        for part in (self._once, self._often):
            if key in part:
                part.move_to_end(key)

    def remove(self, key: Key) -> None:
        for part in (self._once, self._often, self._gone_once, self._gone_often):
            part.pop(key, None)

    def evict(self, n: int, is_protected: IsProtected) -> list[Key] | None:
        """Evict ``n`` keys: from ``once`` while it exceeds its target, else from ``often``."""
        once = _unprotected(self._once, is_protected)
        often = _unprotected(self._often, is_protected)
        left, victims = len(self._once), list[tuple[Key, Keys, Keys]]()
        for _ in range(n):
            # If `once` is exactly at its target (the paper's |T1| = p), it gives up a page too.
            order = (once, often) if left > 0 and left >= self.target else (often, once)
            for part in order:
                if (key := next(part, None)) is not None:
                    break
            else:
                return None
            if part is once:
                left -= 1
                victims.append((key[0], self._once, self._gone_once))
            else:
                victims.append((key[0], self._often, self._gone_often))
        for name, kept, gone in victims:
            del kept[name]
            gone[name] = None
        for gone in (self._gone_once, self._gone_often):
            while len(gone) > self.capacity:
                gone.popitem(last=False)
        return [name for name, _, _ in victims]

    def clear(self) -> None:
        for part in (self._once, self._often, self._gone_once, self._gone_often):
            part.clear()
        self.target = 0.0

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._often


def _unprotected(keys: Keys, is_protected: IsProtected) -> Iterator[tuple[Key]]:
    """Keys that are not protected, the oldest first. Tuples tell a key None from the end."""
    return ((key,) for key in keys if not is_protected(key))

"""The eviction policy ``arc``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from vllm_graft.hicache.host.eviction import EvictionPolicy, IsProtected, Key

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
        self._target = 0.0

    @property
    def target(self) -> float:
        """Number of pages that ``once`` should hold."""
        return self._target

    def insert(self, key: Key, cost: float, size: int) -> None:
        """Add ``key``. A key that was evicted recently counts as used before."""
        if key in self:
            self.touch(key)
        elif key in self._gone_once:
            step = max(1.0, len(self._gone_often) / len(self._gone_once))
            self._target = min(self._target + step, self.capacity)
            del self._gone_once[key]
            self._often[key] = None
        elif key in self._gone_often:
            step = max(1.0, len(self._gone_once) / len(self._gone_often))
            self._target = max(self._target - step, 0.0)
            del self._gone_often[key]
            self._often[key] = None
        else:
            self._once[key] = None

    def touch(self, key: Key) -> None:
        """Count a use of ``key``."""
        if key in self._once:
            del self._once[key]
            self._often[key] = None
        elif key in self._often:
            self._often.move_to_end(key)

    def refresh(self, key: Key) -> None:
        """Make ``key`` the most recent key of its part."""
        for part in (self._once, self._often):
            if key in part:
                part.move_to_end(key)

    def remove(self, key: Key) -> None:
        """Forget ``key``, also if it was evicted."""
        for part in (self._once, self._often, self._gone_once, self._gone_often):
            part.pop(key, None)

    def evict(self, n: int, is_protected: IsProtected) -> list[Key] | None:
        """Evict ``n`` keys: from ``once`` while it exceeds its target, else from ``often``."""
        once = _unprotected(self._once, is_protected)
        often = _unprotected(self._often, is_protected)
        left, victims = len(self._once), list[tuple[Key, Keys, Keys]]()
        for _ in range(n):
            # If `once` is exactly at its target (the paper's |T1| = p), it gives up a page too.
            order = (once, often) if left > 0 and left >= self._target else (often, once)
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
        self._forget()
        return [name for name, _, _ in victims]

    def clear(self) -> None:
        """Forget every key and the target."""
        for part in (self._once, self._often, self._gone_once, self._gone_often):
            part.clear()
        self._target = 0.0

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._often

    def _forget(self) -> None:
        """Remember at most ``capacity`` evicted keys of each part."""
        for gone in (self._gone_once, self._gone_often):
            while len(gone) > self.capacity:
                gone.popitem(last=False)


def _unprotected(keys: Keys, is_protected: IsProtected) -> Iterator[tuple[Key]]:
    """Keys that are not protected, the oldest first. Tuples tell a key None from the end."""
    return ((key,) for key in keys if not is_protected(key))

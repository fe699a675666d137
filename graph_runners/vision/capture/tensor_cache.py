"""A cache of tensors that evicts the least requested ones, and the ranges of its block."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch.utils import _pytree as pytree

ALIGNMENT = 64
"""Ranges start at multiples of so many bytes."""

_HALF_LIFE = 4096
"""Number of requests after which counts are halved."""


class TensorCache:
    """Keeps pytrees of tensors by key, within `limit` bytes; they are only to be read.

    A new key takes the place of another only if it was requested more often (TinyLFU,
    arXiv:1512.00727). LRU would fail if more keys take turns than there is room for: it would evict
    the very key that comes next.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._entries: dict[Hashable, Any] = {}
        self._asked: Counter[Hashable] = Counter()
        self._questions = 0

    def get(self, key: Hashable) -> Any:
        """The tensors kept under `key`, or None; counts the request."""
        self._asked[key] += 1
        self._questions += 1
        if self._questions % _HALF_LIFE == 0:
            self._asked = Counter({old: n // 2 for old, n in self._asked.items() if n > 1})
        return self._entries.get(key)

    def evict_for(self, key: Hashable) -> Hashable | None:
        """Evict the least requested entry, and return its key.

        None if every entry was requested at least as often as `key`.
        """
        least = min(self._entries, key=self._asked.__getitem__, default=None)
        if least is None or self._asked[least] >= self._asked[key]:
            return None
        self.bytes -= num_bytes(self._entries.pop(least))
        return least

    def put(self, key: Hashable, tensors: Any) -> bool:
        """Keep `tensors` under a new key; False if they do not fit."""
        size = num_bytes(tensors)
        if self.bytes + size > self.limit:
            return False
        self._entries[key] = tensors
        self.bytes += size
        return True

    def clear(self) -> None:
        # Counts stay.
        self._entries.clear()
        self.bytes = 0


def num_bytes(tensors: Any) -> int:
    """Bytes of all tensors in a pytree."""
    leaves = pytree.tree_leaves(tensors)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


class Slab:
    """Knows which bytes of a block are free, and hands out the first gap that is large enough."""

    def __init__(self, size: int) -> None:
        self.free = size
        self._gaps = [(0, size)] if size else []

    def take(self, size: int) -> int | None:
        """The start of a new range of `size` bytes; None if no gap is that large."""
        size = aligned(size)
        for place, (start, end) in enumerate(self._gaps):
            if end - start >= size:
                self._gaps[place : place + 1] = [(start + size, end)] if end - start > size else []
                self.free -= size
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Give back the range that :meth:`take` has returned the start of."""
        size = aligned(size)
        self.free += size
        insort(self._gaps, (start, start + size))
        merged: list[tuple[int, int]] = []
        for gap in self._gaps:
            if merged and merged[-1][1] == gap[0]:
                merged[-1] = (merged[-1][0], gap[1])
            else:
                merged.append(gap)
        self._gaps = merged


def aligned(size: int) -> int:
    """Bytes that a range of `size` bytes takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT

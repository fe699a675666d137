"""Tensors kept for reuse, those going first that are asked for the least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch.utils import _pytree as pytree

_HALF_LIFE = 4096
"""Questions after which counts are halved."""


class TensorCache:
    """Pytrees of tensors by key, within a number of bytes. Nobody may write to what is kept.

    A new key takes another's place only if it was asked for more often: with more keys in turn
    than there is room for, the least recently used one is the next to come (TinyLFU,
    arXiv:1512.00727).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._entries: dict[Hashable, Any] = {}
        self._asked: Counter[Hashable] = Counter()
        self._questions = 0

    def get(self, key: Hashable) -> Any:
        """What was kept under `key`, or None; counts the question."""
        self._asked[key] += 1
        self._questions += 1
        if self._questions % _HALF_LIFE == 0:
            self._asked = Counter({old: n // 2 for old, n in self._asked.items() if n > 1})
        return self._entries.get(key)

    def evict_for(self, key: Hashable) -> Hashable | None:
        """Let the entry go that was asked for the least; None if none less than `key`.

        Returns:
            its key.
        """
        least = min(self._entries, key=self._asked.__getitem__, default=None)
        if least is None or self._asked[least] >= self._asked[key]:
            return None
        self.bytes -= num_bytes(self._entries.pop(least))
        return least

    def put(self, key: Hashable, tensors: Any) -> bool:
        """Keep `tensors` under a key that is not kept yet, if they fit; whether they are kept."""
        size = num_bytes(tensors)
        if self.bytes + size > self.limit:
            return False
        self._entries[key] = tensors
        self.bytes += size
        return True

    def clear(self) -> None:
        """Keep nothing; counts stay."""
        self._entries.clear()
        self.bytes = 0


def num_bytes(tensors: Any) -> int:
    """Bytes of all tensors in a pytree."""
    leaves = pytree.tree_leaves(tensors)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))

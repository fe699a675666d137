"""Tensors kept for reuse, the least recently used ones going first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from vllm_graft.graph_runners.core.backend import num_bytes


class TensorCache:
    """Pytrees of tensors by key, within a number of bytes. Nobody may write to what is kept."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        kept = pytree.tree_leaves(list(self._entries.values()))
        return [leaf.nbytes for leaf in kept if isinstance(leaf, torch.Tensor)]

    def get(self, key: Hashable) -> Any:
        """What was kept under `key`, which is now the most recently used; or None."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: Hashable, tensors: Any, room: int) -> None:
        """Keep `tensors`, if they fit.

        Args:
            key: not kept yet.
            tensors: any pytree.
            room: bytes that the cache may grow by, beside its own limit.
        """
        most = min(self.limit, self.bytes + max(0, room))
        size = num_bytes(tensors)
        if size > most:
            return
        while self.bytes + size > most:
            _, old = self._entries.popitem(last=False)
            self.bytes -= num_bytes(old)
        self._entries[key] = tensors
        self.bytes += size

    def clear(self) -> None:
        """Keep nothing."""
        self._entries.clear()
        self.bytes = 0

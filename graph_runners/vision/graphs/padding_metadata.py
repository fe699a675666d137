"""A cache in host memory for the metadata of padded batches, which take up to 1 ms to compute."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from vllm_graft.base.log import logger
from vllm_graft.graph_runners.vision.capture.graph_backend import GraphBackend
from vllm_graft.graph_runners.vision.capture.tensor_cache import Slab, TensorCache, aligned
from vllm_graft.graph_runners.vision.towers.tower import Buffers


class MetadataCache:
    """Keeps tensors by key in one block of host memory, pinned where there is a GPU.

    The device's copy engine reads them. All copies from and to the block run on one stream, so they
    are in order. The block has `limit` bytes.
    """

    def __init__(self, backend: GraphBackend, limit: int) -> None:
        self.hits = self.misses = 0
        self._backend, self._limit = backend, limit
        self._cache = TensorCache(limit)
        self._slab = Slab(0)
        self._block: torch.Tensor | None = None
        self._ranges: dict[Hashable, tuple[int, int]] = {}

    def report(self) -> dict[str, int]:
        return {
            "hits": self.hits,
            "misses": self.misses,
            "host_bytes": self._cache.bytes,
            "host_limit": 0 if self._block is None else self._limit,
        }

    def open(self) -> None:
        """Allocate the block once; if the host does not have it, nothing is kept."""
        if self._block is not None:
            return
        try:
            self._block = self._backend.host_block(self._limit)
        except RuntimeError as error:
            logger.warning(
                "vision graphs: no %d MiB of pinned host memory, so metadata of padded batches is "
                "computed anew each time: %s",
                self._limit >> 20,
                error,
            )
            return
        self._slab = Slab(self._limit)

    def get(self, key: Hashable) -> Buffers | None:
        """The tensors kept under `key`, or None; they are only to be read."""
        found: Buffers | None = self._cache.get(key)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
        return found

    def keep(self, key: Hashable, tensors: Buffers) -> bool:
        """Copy tensors into the block under a new key.

        False if there is no room, as the other keys are requested as often.
        """
        if self._block is None:
            return False
        size = sum(aligned(value.nbytes) for value in tensors.values())
        while (start := self._slab.take(size)) is None:
            if (evicted := self._cache.evict_for(key)) is None:
                return False
            self._slab.give(*self._ranges.pop(evicted))
        kept, place = {}, start
        for name, value in tensors.items():
            if value.ndim == 0:
                kept[name] = value  # A number that kernels read on the host.
                continue
            room = self._block[place : place + value.nbytes]
            kept[name] = room.view(value.dtype).view(value.shape)
            kept[name].copy_(value, non_blocking=True)
            place += aligned(value.nbytes)
        self._ranges[key] = start, size
        return self._cache.put(key, kept)

    def clear(self) -> None:
        """Drop all entries; the block stays for the graphs that are captured next."""
        self._cache.clear()
        self._ranges.clear()
        self._slab = Slab(self._limit if self._block is not None else 0)

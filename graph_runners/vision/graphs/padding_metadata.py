"""A cache in host memory for the metadata of padded batches, which take up to 1 ms to compute."""

from bisect import insort
from collections.abc import Hashable

import torch

from vllm_graft.base.log import logger
from vllm_graft.graph_runners.vision.capture.admission import Admission
from vllm_graft.graph_runners.vision.capture.graph_backend import GraphBackend
from vllm_graft.graph_runners.vision.towers.tower import Buffers

ALIGNMENT = 64
"""Ranges of the block start at multiples of so many bytes."""


class MetadataCache:
    """Keeps tensors by key in one block of host memory, pinned where there is a GPU.

    The device's copy engine reads them. All copies from and to the block run on one stream, so they
    are in order. The block has `limit` bytes. A new key takes the place of another only if it was
    requested more often. LRU would fail if more keys take turns than there is room for: it would
    evict the very key that comes next."""

    def __init__(self, backend: GraphBackend, limit: int) -> None:
        self.hits = self.misses = 0
        self._backend, self._limit = backend, limit
        self._requests: Admission[Hashable] = Admission(min_hits=1)
        self._kept: dict[Hashable, Buffers] = {}
        self._slab = Slab(0)
        self._block: torch.Tensor | None = None
        self._ranges: dict[Hashable, tuple[int, int]] = {}

    def report(self) -> dict[str, int]:
        return {
            "hits": self.hits,
            "misses": self.misses,
            "host_bytes": sum(t.nbytes for kept in self._kept.values() for t in kept.values()),
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
        self._requests.see([key])
        found = self._kept.get(key)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
        return found

    def keep(self, key: Hashable, tensors: Buffers) -> bool:
        """Copy tensors into the block under a new key. False if there is no room, as the other keys
        are requested as often."""
        if self._block is None:
            return False
        size = sum(aligned(value.nbytes) for value in tensors.values())
        while (start := self._slab.take(size)) is None:
            if (evicted := self._requests.victim(self._kept, key)) is None:
                return False
            del self._kept[evicted]
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
        self._ranges[key], self._kept[key] = (start, size), kept
        return True

    def clear(self) -> None:
        """Drop all entries; the block stays for the graphs that are captured next."""
        self._kept.clear()
        self._ranges.clear()
        self._slab = Slab(self._limit if self._block is not None else 0)


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

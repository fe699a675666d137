"""A block of memory that ranges are taken from and given back to."""

from __future__ import annotations

from bisect import insort

ALIGNMENT = 64
"""Ranges start at multiples of so many bytes."""


class Slab:
    """Knows which bytes of a block are free, and hands out the first gap that is large enough.

    Args:
        size: bytes of the block.

    Attributes:
        free: bytes that are not handed out.
    """

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
        """Give back a range: the start that :meth:`take` returned, and the same size."""
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

"""One block of memory, from which ranges are taken and to which they are given back."""

from __future__ import annotations

from bisect import insort

ALIGNMENT = 64
"""Ranges start at multiples of it."""


class Slab:
    """Which bytes of a block are free: the first range that is large enough is taken.

    Attributes:
        free: bytes that nobody has.
    """

    def __init__(self, size: int) -> None:
        self.free = size
        self._gaps = [(0, size)] if size else []

    def take(self, size: int) -> int | None:
        """The start of a range of `size` bytes; None where no gap is as large."""
        size = aligned(size)
        for place, (start, end) in enumerate(self._gaps):
            if end - start >= size:
                self._gaps[place : place + 1] = [(start + size, end)] if end - start > size else []
                self.free -= size
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Give back what `take` gave for this size."""
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
    """Bytes that a range of `size` takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT

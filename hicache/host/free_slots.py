"""The slots that hold nothing, as ranges: pages that are stored together shall lie together.

2D copies (``strided``) want slots that go up one by one where the device's blocks do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

_LOOKED_AT = 8
"""Ranges of about the wanted length that are tried before a longer one is cut."""


class FreeSlots:
    """Gives out ranges of slots, and joins again what comes back.

    Segregated fits with boundary tags (Knuth, The Art of Computer Programming 1, 2.5): ranges are
    kept by the number of bits of their length, and found by either end, so that no call looks at
    all of them. The caller answers for giving back only what it has taken.

    Args:
        count: slots ``0`` to ``count - 1`` are free.
    """

    def __init__(self, count: int) -> None:
        self._free = 0
        self._ends: dict[int, int] = {}
        """By first slot of a range, the one behind its last."""
        self._firsts: dict[int, int] = {}
        """The other way round."""
        self._classes: list[dict[int, None]] = [{} for _ in range(count.bit_length() + 1)]
        """By bits of the length, first slots; the oldest first."""
        if count:
            self._insert(0, count)

    def __len__(self) -> int:
        return self._free

    def __iter__(self) -> Iterator[int]:
        """In ascending order."""
        for first, end in sorted(self._ends.items()):
            yield from range(first, end)

    def take(self, count: int) -> list[int]:
        """``count`` slots in ascending order, in as few ranges as is easily found.

        Raises:
            ValueError: if there are fewer; nothing is taken then.
        """
        if count > self._free:
            raise ValueError(f"{count} slots are wanted, {self._free} are free")
        taken: list[int] = []
        while (missing := count - len(taken)) > 0:
            first = self._choose(missing)
            end = self._remove(first)
            stop = min(end, first + missing)
            taken.extend(range(first, stop))
            if stop < end:
                self._insert(stop, end)
        taken.sort()
        return taken

    def give(self, slot: int) -> None:
        """Take a slot back."""
        first, end = slot, slot + 1
        if end in self._ends:
            end = self._remove(end)
        if first in self._firsts:
            first = self._firsts[first]
            self._remove(first)
        self._insert(first, end)

    def _choose(self, count: int) -> int:
        """A short range that is long enough, or else a long one."""
        bits = count.bit_length()
        if bits < len(self._classes):
            for first in islice(self._classes[bits], _LOOKED_AT):
                if self._ends[first] - first >= count:
                    return first
        longer = range(bits + 1, len(self._classes))
        shorter = range(min(bits, len(self._classes) - 1), 0, -1)
        found: dict[int, None] = next(
            self._classes[size] for size in (*longer, *shorter) if self._classes[size]
        )
        return next(iter(found))

    def _insert(self, first: int, end: int) -> None:
        self._ends[first], self._firsts[end] = end, first
        self._classes[(end - first).bit_length()][first] = None
        self._free += end - first

    def _remove(self, first: int) -> int:
        """Take a range out; returns where it ends."""
        end = self._ends.pop(first)
        del self._firsts[end]
        del self._classes[(end - first).bit_length()][first]
        self._free -= end - first
        return end


def facing(slots: Sequence[int], blocks: Sequence[int]) -> list[int]:
    """The same slots, reversed over each stretch in which ``blocks`` go down one by one.

    vLLM frees the blocks of a request tail first and hands them out in that order, so every other
    prefix has them in descending order; a 2D copy only goes up. What is stored so can be loaded in
    2D copies into blocks that go down as well, which is as likely as that they go up.

    Args:
        slots: ascending, one for each block.
        blocks: in the order of the prefix.
    """
    found, begin = list(slots), 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] - 1:
            found[begin:end] = found[begin:end][::-1]
            begin = end
    return found

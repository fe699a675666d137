"""The free slots of the host pool, kept as ranges. Pages that are stored together should get
consecutive slots, because 2D copies (``strided``) need slots that ascend one by one along with the
device's blocks."""

from collections.abc import Sequence
from itertools import islice

_LOOKED_AT = 8
"""Number of ranges of about the wanted length that are tried before a longer one is split."""


class FreeSlots:
    """Allocates slots in ranges, and merges ranges when slots are returned.

    The algorithm is segregated fits with boundary tags (Knuth, The Art of Computer Programming 1,
    2.5). Ranges are grouped by the number of bits of their length, and are found by either end, so
    no call searches all of them. The caller must return only slots that it has taken. At first the
    slots ``0`` to ``count - 1`` are free.
    """

    def __init__(self, count: int) -> None:
        self._free = 0
        self._ends: dict[int, int] = {}
        """Maps the first slot of each range to the slot after its last one."""
        self._firsts: dict[int, int] = {}
        """Maps the slot after the last one of each range to its first slot."""
        self._classes: list[dict[int, None]] = [{} for _ in range(count.bit_length() + 1)]
        """First slots of ranges, the oldest range first; indexed by the bits of their length."""
        if count:
            self._insert(0, count)

    def __len__(self) -> int:
        return self._free

    def take(self, count: int) -> list[int]:
        """Take ``count`` slots in ascending order, from few ranges if possible. Raises `ValueError`
        if fewer slots are free. Nothing is taken then."""
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
        first, end = slot, slot + 1
        if end in self._ends:
            end = self._remove(end)
        if first in self._firsts:
            first = self._firsts[first]
            self._remove(first)
        self._insert(first, end)

    def _choose(self, count: int) -> int:
        """The first slot of a range to take: one of about ``count`` slots if it is long enough.
        Otherwise it is a longer range, or one of the longest if all are shorter."""
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
        """Remove a range, and return the slot after its last one."""
        end = self._ends.pop(first)
        del self._firsts[end]
        del self._classes[(end - first).bit_length()][first]
        self._free -= end - first
        return end


def facing(slots: Sequence[int], blocks: Sequence[int]) -> list[int]:
    """Reverse the slots wherever the blocks descend one by one, so that both ascend together.

    ``slots`` has an ascending slot for each of the blocks, which are in the order of the prefix.
    vLLM frees the blocks of a request tail first and reuses them in that order. So every other
    prefix has descending blocks, while a 2D copy needs blocks and slots that ascend. Pages stored
    like this can later be loaded by 2D copies into blocks that descend too, which is as likely as
    blocks that ascend.
    """
    found, begin = list(slots), 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] - 1:
            found[begin:end] = found[begin:end][::-1]
            begin = end
    return found

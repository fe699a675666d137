"""Bytes that a set of graphs may take."""

from __future__ import annotations

from collections.abc import Hashable


class ByteBudget:
    """Accounts for device memory, each owner under its key.

    Memory of a shared pool is one owner's: graphs that go do not shrink it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._owners: dict[Hashable, int] = {}

    @property
    def used(self) -> int:
        """Bytes accounted for."""
        return sum(self._owners.values())

    @property
    def free(self) -> int:
        """Bytes left; below 0 when the limit is passed."""
        return self.limit - self.used

    @property
    def owners(self) -> dict[Hashable, int]:
        """Bytes by owner."""
        return dict(self._owners)

    def of(self, owner: Hashable) -> int:
        """Bytes of one owner."""
        return self._owners.get(owner, 0)

    def set(self, owner: Hashable, num_bytes: int) -> None:
        """`owner` takes so many bytes, whatever it took before."""
        self._owners[owner] = num_bytes

    def add(self, owner: Hashable, num_bytes: int) -> None:
        """`owner` takes so many bytes more."""
        self._owners[owner] = self._owners.get(owner, 0) + num_bytes

    def drop(self, owner: Hashable) -> None:
        """`owner` takes nothing any more."""
        self._owners.pop(owner, None)

    def clear(self) -> None:
        """Nobody takes anything."""
        self._owners.clear()

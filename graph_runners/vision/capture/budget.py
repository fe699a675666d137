"""Bytes that a set of graphs may take."""

from __future__ import annotations

from collections.abc import Hashable


class ByteBudget:
    """Accounts for device memory by owner.

    A shared pool is one owner, as it does not shrink when a graph is dropped.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._owners: dict[Hashable, int] = {}

    @property
    def used(self) -> int:
        return sum(self._owners.values())

    @property
    def free(self) -> int:
        """Bytes left; negative if more than the limit is used."""
        return self.limit - self.used

    @property
    def owners(self) -> dict[Hashable, int]:
        return dict(self._owners)

    def of(self, owner: Hashable) -> int:
        return self._owners.get(owner, 0)

    def set(self, owner: Hashable, num_bytes: int) -> None:
        self._owners[owner] = num_bytes

    def add(self, owner: Hashable, num_bytes: int) -> None:
        self._owners[owner] = self._owners.get(owner, 0) + num_bytes

    def drop(self, owner: Hashable) -> None:
        self._owners.pop(owner, None)

    def clear(self) -> None:
        self._owners.clear()

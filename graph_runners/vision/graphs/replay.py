"""One replay of a captured graph, and the items of a batch that it serves."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

LayoutKey = tuple[Hashable, int]
"""A layout and a number of items: names an exact graph."""


@dataclass(frozen=True)
class ExactReplay:
    """A replay of the exact graph of one layout.

    Attributes:
        indices: places of the items in the batch, in the order of the graph's rows.
        rows: patches of these items.
        key: the graph.
    """

    indices: tuple[int, ...]
    rows: int
    key: LayoutKey

    def __str__(self) -> str:
        return str(self.key)


@dataclass(frozen=True)
class PaddedReplay:
    """A replay of the padded graph of a bucket.

    Attributes:
        indices: places of the items in the batch, in the order of the graph's rows.
        rows: patches of these items.
        bucket: patches of the graph; padding fills what the items leave.
    """

    indices: tuple[int, ...]
    rows: int
    bucket: int

    def __str__(self) -> str:
        return str(self.bucket)


Replay = ExactReplay | PaddedReplay

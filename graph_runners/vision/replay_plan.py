"""How a batch is cut into replays: pure functions of layouts and numbers of patches.

Items do not attend to each other, so a batch may be regrouped freely. Costs are in rows (patches)
and not in seconds, so that all ranks choose alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Hashable, Iterable, Sequence

from vllm_graft.graph_runners.vision.graphs.vision_batch import (
    ExactReplay,
    LayoutKey,
    PaddedReplay,
    Replay,
)
from vllm_graft.graph_runners.vision.towers.tower import Item

MAX_GROUP = 16
"""The most items of one exact graph."""

_REPLAY, _METADATA, _METADATA_ITEM = 256, 192, 48
"""Costs in rows: of a replay, of the metadata of a padded batch, and of each item in it."""

SizeClass = tuple[int, int]
"""Batches of about as much work; see :func:`size_class`."""


def groups(items: Sequence[Item], max_rows: int) -> list[ExactReplay]:
    """The exact replays that would serve a batch, whether or not their graphs exist.

    Each group holds items of one layout: a power of two of them, which keeps the number of graphs
    small, `MAX_GROUP` at most, and `max_rows` patches at most unless a single item is larger.
    """
    by_layout: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        by_layout.setdefault(item.layout, []).append(index)
    found = []
    for layout, indices in by_layout.items():
        rows = items[indices[0]].rows
        most = max(1, min(MAX_GROUP, max_rows // max(1, rows)))
        while indices:
            size = 1 << (min(len(indices), most).bit_length() - 1)
            found.append(ExactReplay(tuple(indices[:size]), size * rows, (layout, size)))
            indices = indices[size:]
    return found


def choose(
    items: Sequence[Item],
    exact: Sequence[ExactReplay],
    captured: Container[LayoutKey],
    buckets: Sequence[int],
    max_items: int,
    cut: bool = False,
) -> list[Replay] | None:
    """The cheapest replays that serve the whole batch; None if there are none.

    Args:
        items: the batch.
        exact: its groups, from :func:`groups`.
        captured: keys of the exact graphs that exist.
        buckets: patches of the captured buckets, ascending.
        max_items: the most items of one padded graph.
        cut: whether items that no single bucket holds may go to several.
    """
    hits: list[Replay] = [group for group in exact if group.key in captured]
    cold = [index for group in exact if group.key not in captured for index in group.indices]
    plans = []
    if not cold:
        plans.append(hits)
    elif rest := _padded(items, sorted(cold), buckets, max_items, cut):
        plans.append([*rest, *hits])
    if hits and (whole := _padded(items, range(len(items)), buckets, max_items, cut)):
        plans.append(whole)
    return min(plans, key=_cost, default=None)


def _padded(
    items: Sequence[Item], indices: Iterable[int], buckets: Sequence[int], max_items: int, cut: bool
) -> list[Replay] | None:
    chosen = tuple(indices)
    if (one := _bucket(items, chosen, buckets, max_items)) or not (cut and buckets):
        return [one] if one else None
    found: list[Replay] = []
    for group in even_groups(items, chosen, buckets[-1], max_items) or ():
        replay = _bucket(items, group, buckets, max_items)
        if replay is None:
            return None
        found.append(replay)
    return found or None


def _bucket(
    items: Sequence[Item], chosen: tuple[int, ...], buckets: Sequence[int], max_items: int
) -> PaddedReplay | None:
    """The smallest bucket that holds all chosen items."""
    rows = sum(items[index].rows for index in chosen)
    place = bisect_left(buckets, rows)
    if place == len(buckets) or len(chosen) > max_items:
        return None
    return PaddedReplay(chosen, rows, buckets[place])


def even_groups(
    items: Sequence[Item], indices: Sequence[int], max_rows: int, max_items: int
) -> list[tuple[int, ...]] | None:
    """Cut these items into as few groups as fit, of about as many rows each; None if one can't.

    A group has at most `max_rows` patches and `max_items` items. The largest items are dealt out
    first, each to the group with the fewest rows (Graham's LPT rule, SIAM J. Appl. Math. 17, 1969);
    if a group comes out too large, there is one group more. Items of one layout are then exchanged
    so that neighbours in the batch lie side by side in a group.
    """
    if not indices or max(items[index].rows for index in indices) > max_rows:
        return None
    total = sum(items[index].rows for index in indices)
    number = max(-(-total // max_rows), -(-len(indices) // max_items))
    while (found := _deal(items, indices, number, max_items)) is not None:
        if all(sum(items[index].rows for index in group) <= max_rows for group in found):
            return found
        number += 1
    return None


def _deal(
    items: Sequence[Item], indices: Sequence[int], number: int, max_items: int
) -> list[tuple[int, ...]] | None:
    if number > len(indices):
        return None
    layouts: list[list[Hashable]] = [[] for _ in range(number)]
    rows = [0] * number
    for index in sorted(indices, key=lambda index: (-items[index].rows, index)):
        place = min(
            (at for at in range(number) if len(layouts[at]) < max_items), key=rows.__getitem__
        )
        layouts[place].append(items[index].layout)
        rows[place] += items[index].rows
    waiting: dict[Hashable, list[int]] = {}
    for index in sorted(indices, reverse=True):
        waiting.setdefault(items[index].layout, []).append(index)
    return [tuple(sorted(waiting[layout].pop() for layout in group)) for group in layouts]


def size_class(items: Sequence[Item]) -> SizeClass:
    """A class of batches of about as much work, to remember measurements by.

    It is the batch's patches in steps of 1024, and the bit length of its largest item's patches.
    """
    rows = sum(item.rows for item in items)
    return -(-rows // 1024), max(item.rows for item in items).bit_length()


def _cost(plan: Sequence[Replay]) -> int:
    return sum(
        _REPLAY + replay.rows
        if isinstance(replay, ExactReplay)
        else _REPLAY + replay.bucket + _METADATA + _METADATA_ITEM * len(replay.indices)
        for replay in plan
    )

"""How a batch is cut into replays. Pure; costs are in rows (patches), so all ranks agree.

Attention of a vision encoder is block-diagonal, so items may be regrouped freely. Items of one
layout form groups of a power of two, which keeps the number of distinct graphs at (layouts) times
(a few sizes).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass

from vllm_graft.graph_runners.vision.towers.tower import Item

MAX_GROUP = 16
"""Items of one exact graph, at most."""

# About 1 ms on an H200 per 1000 patches: a replay with its copies and clones costs a quarter of
# that, the metadata of a padded batch about as much again and a little for each item.
_REPLAY, _METADATA, _METADATA_ITEM = 256, 192, 48

LayoutKey = tuple[Hashable, int]
"""Layout, and number of items."""

SizeClass = tuple[int, int]
"""Of a batch: see :func:`size_class`."""


@dataclass(frozen=True)
class Step:
    """One replay.

    Attributes:
        indices: the items, in the order of the graph's rows.
        rows: patches of the items.
        key: of the exact graph; None for a bucket.
        bucket: rows of the bucket; None for an exact graph.
    """

    indices: tuple[int, ...]
    rows: int
    key: LayoutKey | None = None
    bucket: int | None = None


def groups(items: Sequence[Item], max_rows: int) -> list[Step]:
    """Exact replays that would serve the batch: items of one layout, powers of two."""
    by_layout: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        by_layout.setdefault(item.layout, []).append(index)
    found = []
    for layout, indices in by_layout.items():
        rows = items[indices[0]].rows
        most = max(1, min(MAX_GROUP, max_rows // max(1, rows)))
        while indices:
            size = 1 << (min(len(indices), most).bit_length() - 1)
            found.append(Step(tuple(indices[:size]), size * rows, key=(layout, size)))
            indices = indices[size:]
    return found


def choose(
    items: Sequence[Item],
    exact: Sequence[Step],
    captured: Container[LayoutKey],
    buckets: Sequence[int],
    max_items: int,
    cut: bool = False,
) -> list[Step] | None:
    """The cheapest replays that serve the whole batch; None where there are none.

    Args:
        items: of the batch.
        exact: what :func:`groups` gave for them.
        captured: keys that have a graph.
        buckets: rows of the captured buckets, ascending.
        max_items: items of one bucket replay, at most.
        cut: whether what no bucket holds may go to several.
    """
    hits = [step for step in exact if step.key in captured]
    cold = [index for step in exact if step.key not in captured for index in step.indices]
    plans = []
    if not cold:
        plans.append(hits)
    elif rest := _padded(items, sorted(cold), buckets, max_items, cut):
        plans.append([*rest, *hits])
    if hits and (whole := _padded(items, range(len(items)), buckets, max_items, cut)):
        plans.append(whole)
    return min(plans, key=_cost, default=None)


def _padded(
    items: Sequence[Item],
    indices: Iterable[int],
    buckets: Sequence[int],
    max_items: int,
    cut: bool,
) -> list[Step] | None:
    chosen = tuple(indices)
    if (one := _bucket(items, chosen, buckets, max_items)) or not (cut and buckets):
        return [one] if one else None
    found = []
    for group in even_groups(items, chosen, buckets[-1], max_items) or ():
        step = _bucket(items, group, buckets, max_items)
        if step is None:
            return None
        found.append(step)
    return found or None


def _bucket(
    items: Sequence[Item], chosen: tuple[int, ...], buckets: Sequence[int], max_items: int
) -> Step | None:
    rows = sum(items[index].rows for index in chosen)
    place = bisect_left(buckets, rows)
    if place == len(buckets) or len(chosen) > max_items:
        return None
    return Step(chosen, rows, bucket=buckets[place])


def even_groups(
    items: Sequence[Item], indices: Sequence[int], max_rows: int, max_items: int
) -> list[tuple[int, ...]] | None:
    """Cut items into few groups of about as many rows each; None if one is too large by itself.

    The largest first, each to the group with the fewest rows (Graham's LPT rule, SIAM J. Appl.
    Math. 17, 1969), with one group more until all fit. Items of one layout are then dealt out in
    order, so that a group's data lie side by side where they do in the batch.

    Args:
        items: of the batch.
        indices: the items to cut.
        max_rows: of one group.
        max_items: of one group.
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
    groups: list[list[Hashable]] = [[] for _ in range(number)]
    rows = [0] * number
    for index in sorted(indices, key=lambda index: (-items[index].rows, index)):
        place = min(
            (at for at in range(number) if len(groups[at]) < max_items), key=rows.__getitem__
        )
        groups[place].append(items[index].layout)
        rows[place] += items[index].rows
    waiting: dict[Hashable, list[int]] = {}
    for index in sorted(indices, reverse=True):
        waiting.setdefault(items[index].layout, []).append(index)
    return [tuple(sorted(waiting[layout].pop() for layout in group)) for group in groups]


def size_class(items: Sequence[Item]) -> SizeClass:
    """Batches of about as much work: rows in steps of 1024, the largest item in powers of two."""
    rows = sum(item.rows for item in items)
    return -(-rows // 1024), max(item.rows for item in items).bit_length()


def _cost(plan: Sequence[Step]) -> int:
    return sum(
        _REPLAY + step.rows
        if step.bucket is None
        else _REPLAY + step.bucket + _METADATA + _METADATA_ITEM * len(step.indices)
        for step in plan
    )


def bucket_sizes(
    smallest: int, largest: int, unit: int, growth: float = 1.25, widest: float = math.inf
) -> list[int]:
    """Rows of the buckets, ascending: multiples of `unit` in steps of `growth`.

    A batch is padded by at most `growth` - 1 of its rows, and by half of that on average; by
    about `widest` rows at most.
    """
    sizes: list[int] = []
    size = float(smallest)
    while size < largest:
        rounded = -(-int(size) // unit) * unit
        if rounded < largest and (not sizes or rounded > sizes[-1]):
            sizes.append(rounded)
        size = min(size * growth, size + widest)
    top = largest // unit * unit
    if top and (not sizes or top > sizes[-1]):
        sizes.append(top)
    return sizes

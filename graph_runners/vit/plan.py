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

from vllm_graft.graph_runners.vit.tower import Item

MAX_GROUP = 16
"""Items of one exact graph, at most."""

# About 1 ms on an H200 per 1000 patches: a replay with its copies and clones costs a quarter of
# that, the metadata of a padded batch about as much again and a little for each item.
_REPLAY, _METADATA, _METADATA_ITEM = 256, 192, 48

LayoutKey = tuple[Hashable, int]
"""Layout, and number of items."""


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
) -> list[Step] | None:
    """The cheapest replays that serve the whole batch; None where there are none.

    Args:
        items: of the batch.
        exact: what :func:`groups` gave for them.
        captured: keys that have a graph.
        buckets: rows of the captured buckets, ascending.
        max_items: items of one bucket replay, at most.
    """
    hits = [step for step in exact if step.key in captured]
    cold = [index for step in exact if step.key not in captured for index in step.indices]
    plans = []
    if not cold:
        plans.append(hits)
    elif rest := _bucket(items, sorted(cold), buckets, max_items):
        plans.append([rest, *hits])
    if hits and (whole := _bucket(items, range(len(items)), buckets, max_items)):
        plans.append([whole])
    return min(plans, key=_cost, default=None)


def _bucket(
    items: Sequence[Item], indices: Iterable[int], buckets: Sequence[int], max_items: int
) -> Step | None:
    chosen = tuple(indices)
    rows = sum(items[index].rows for index in chosen)
    place = bisect_left(buckets, rows)
    if place == len(buckets) or len(chosen) > max_items:
        return None
    return Step(chosen, rows, bucket=buckets[place])


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

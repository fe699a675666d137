"""How a batch is divided into replays: pure functions of layouts and numbers of patches. Items do
not attend to each other, so a batch may be regrouped freely. Costs are in rows (patches) and not in
seconds, so that all ranks choose alike."""

from bisect import bisect_left
from collections.abc import Container, Hashable, Sequence

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


def groups(items: Sequence[Item], max_rows: int) -> list[ExactReplay]:
    """The exact replays that would serve a batch, whether or not their graphs exist. Each group
    holds items of one layout: a power of two of them, which keeps the number of graphs small,
    `MAX_GROUP` at most, and `max_rows` patches at most unless a single item is larger."""
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
) -> list[Replay] | None:
    """The cheapest replays that serve the whole batch; None if there are none. `exact` are its
    groups, `captured` the keys of graphs that exist, `buckets` the patches of captured buckets,
    ascending, and `max_items` the most items of one padded graph."""
    hits: list[Replay] = [group for group in exact if group.key in captured]
    cold = [index for group in exact if group.key not in captured for index in group.indices]
    plans = []
    if not cold:
        plans.append(hits)
    elif rest := _bucket(items, sorted(cold), buckets, max_items):
        plans.append([rest, *hits])
    if hits and (whole := _bucket(items, range(len(items)), buckets, max_items)):
        plans.append([whole])
    return min(plans, key=_cost, default=None)


def _bucket(
    items: Sequence[Item], chosen: Sequence[int], buckets: Sequence[int], max_items: int
) -> PaddedReplay | None:
    """The smallest bucket that holds all chosen items."""
    rows = sum(items[index].rows for index in chosen)
    place = bisect_left(buckets, rows)
    if place == len(buckets) or len(chosen) > max_items:
        return None
    return PaddedReplay(tuple(chosen), rows, buckets[place])


def _cost(plan: Sequence[Replay]) -> int:
    return sum(
        _REPLAY + replay.rows
        if isinstance(replay, ExactReplay)
        else _REPLAY + replay.bucket + _METADATA + _METADATA_ITEM * len(replay.indices)
        for replay in plan
    )

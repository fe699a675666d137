"""Behaviours of vLLM and of ours that change under the same signature, each planted by a patch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_graft.graph_runners.vision.graphs import graph_store
from vllm_graft.graph_runners.vision.graphs.graph import PaddedGraph, TowerGraph
from vllm_graft.graph_runners.vision.towers.grid_tower import PIXELS, GridTower
from vllm_graft.hicache.host.controller import HybridCacheController
from vllm_graft.hicache.host.index import HostIndex, Page
from vllm_graft.hicache.messages.operation import Direction
from vllm_graft.spec_decode.targets.dense import layer as dense_layer
from vllm_graft.spec_decode.verification import context, sampler


@dataclass(frozen=True)
class Fault:
    """One fault; `round` names the first round of questions that has to show it."""

    name: str
    round: str
    plant: Callable[[pytest.MonkeyPatch], None]


def _after(patch: pytest.MonkeyPatch, owner: Any, name: str, then: Callable[..., Any]) -> None:
    """Let what a function does be followed by `then`, which gets its result and its arguments."""
    stock = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return then(stock(*args, **kwargs), *args, **kwargs)

    patch.setattr(owner, name, changed)


def _slots(patch: pytest.MonkeyPatch) -> None:
    def next_one(slots: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return slots.add_(slots >= 0)

    _after(patch, BlockTables, "compute_slot_mappings", next_one)


def _block_order(patch: pytest.MonkeyPatch) -> None:
    def swapped(tables: tuple[torch.Tensor, ...], *_: Any, **__: Any) -> Any:
        for table in tables:
            table[:, :2] = table[:, :2].flip(1)
        return tables

    _after(patch, BlockTables, "gather_block_tables", swapped)


def _rows(change: Callable[[Any, Any], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Change what was prepared for a batch with trees."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def then(_: None, tree: Any, batch: Any, computed: Any, rows: Any, **__: Any) -> None:
            if batch.num_draft_tokens:
                change(batch, rows)

        _after(patch, context, "prepare_rows", then)

    return plant


def _later_positions(batch: Any, rows: Any) -> None:
    batch.positions += 1


def _linear_positions(batch: Any, rows: Any) -> None:
    """Take the place of a row for its depth, as in a chain."""
    starts = batch.query_start_loc.tolist()
    for first, last in itertools.pairwise(starts):
        batch.positions[first:last] = batch.positions[first] + torch.arange(last - first)


def _wider_masks(batch: Any, rows: Any) -> None:
    rows.row_masks.bitwise_or_(2)


def _seeds(patch: pytest.MonkeyPatch) -> None:
    stock = vars(sampler)["gumbel_sample"]

    def other(
        logits: Any, mapping: Any, temperature: Any, seeds: Any, *args: Any, **more: Any
    ) -> Any:
        return stock(logits, mapping, temperature, seeds + 1, *args, **more)

    patch.setattr(sampler, "gumbel_sample", other)


def _one_token_more(patch: pytest.MonkeyPatch) -> None:
    def longer(_: None, *args: Any, num_rejected: Any = None, **__: Any) -> None:
        starts, sampled, num_sampled = args[2], args[5], args[7]
        rows = torch.arange(len(num_sampled))
        more = (num_sampled > 0) & (num_sampled < starts.diff())
        last = sampled[rows, (num_sampled - 1).clamp(min=0).long()]
        sampled[rows[more], num_sampled[more].long()] = last[more]
        num_sampled += more
        if num_rejected is not None:
            num_rejected -= more

    _after(patch, sampler, "walk_tree", longer)


def _drafts_of_another(patch: pytest.MonkeyPatch) -> None:
    stock = vars(sampler)["walk_tree"]

    def mixed(drawn: Any, drafts: Any, starts: Any, *args: Any, **more: Any) -> None:
        stock(drawn, drafts.roll(int(starts[1])), starts, *args, **more)

    patch.setattr(sampler, "walk_tree", mixed)


def _no_moves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dense_layer, "compact_kv", lambda *args, **kwargs: None)


def _loads(change: Callable[[list[int], list[int]], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Change the slots and the blocks of loads from the host."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def then(operation: Any, _: Any, direction: Direction, *args: Any) -> Any:
            for transfer in operation.transfers if direction is Direction.LOAD else ():
                change(transfer.host_indices, transfer.device_indices)
            return operation

        _after(patch, HybridCacheController, "_issue", then)

    return plant


def _one_page_twice(slots: list[int], blocks: list[int]) -> None:
    slots[-1] = slots[0]


def _other_blocks(slots: list[int], blocks: list[int]) -> None:
    blocks.append(blocks.pop(0))


def _stale_pages(patch: pytest.MonkeyPatch) -> None:
    """Pages that were evicted are still offered, in slots that have other pages by now."""
    gone: dict[Any, int] = {}

    def noted(pages: Any, *_: Any, **__: Any) -> Any:
        for page in pages or ():
            gone[page.key] = page.slot
        return pages

    def there(page: Any, self: Any, key: Any) -> Any:
        return page or (Page(key, gone[key], ready=True) if key in gone else None)

    _after(patch, HostIndex, "reserve", noted)
    _after(patch, HostIndex, "get", there)
    _after(patch, HostIndex, "has", lambda has, self, key: has or key in gone)


FAULTS = (
    Fault("slots are one too far", "prompts", _slots),
    Fault("positions are one too far", "prompts", _rows(_later_positions)),
    Fault("positions are those of a chain", "prompts", _rows(_linear_positions)),
    Fault("masks are one node too wide", "prompts", _rows(_wider_masks)),
    Fault("seeds are others", "seeds", _seeds),
    Fault("blocks come in another order", "prompts", _block_order),
    Fault("one token more is accepted", "prompts", _one_token_more),
    Fault("drafts are those of another request", "prompts", _drafts_of_another),
    Fault("accepted K/V stays where it was", "prompts", _no_moves),
    Fault("the host copies one page twice", "host cache", _loads(_one_page_twice)),
    Fault("the host copies to other blocks", "parts of what was loaded", _loads(_other_blocks)),
    Fault("evicted pages are still offered", "after evictions", _stale_pages),
)


def _of_pads(patch: pytest.MonkeyPatch) -> None:
    """Let the last image of a padded graph attend to the padding."""

    def wider(found: Any, _: PaddedGraph, items: Any) -> Any:
        ends = found["cu_seqlens"] = found["cu_seqlens"].clone()
        ends[len(items)] = ends[len(items) + 1]
        return found

    _after(patch, PaddedGraph, "metadata", wider)


def _positions_of_patches(patch: pytest.MonkeyPatch) -> None:
    def rolled(found: Any, *_: Any) -> Any:
        return {
            name: value.roll(1, 0) if "rotary" in name or "pos" in name else value
            for name, value in found.items()
        }

    _after(patch, GridTower, "constants", rolled)


def _stale_pixels(patch: pytest.MonkeyPatch) -> None:
    """A graph takes data when it is captured and checked, and keeps them."""
    stock = TowerGraph._load_data
    known: list[TowerGraph] = []

    def load(graph: TowerGraph, pieces: Any) -> Any:
        if known.count(graph):
            return sum(map(len, pieces[PIXELS]))
        known.append(graph)
        return stock(graph, pieces)

    patch.setattr(TowerGraph, "_load_data", load)


def _images_of_another(patch: pytest.MonkeyPatch) -> None:
    def swapped(parts: Any, *_: Any) -> Any:
        return parts[::-1] if len({len(part) for part in parts}) == 1 else parts

    _after(patch, GridTower, "split", swapped)


def _no_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(graph_store, "_clones", list)


SIGHT_FAULTS = (
    Fault("images attend to padding", "gave other embeddings", _of_pads),
    Fault("patches have other positions", "gave other embeddings", _positions_of_patches),
    Fault("pixels are those of an earlier image", "images", _stale_pixels),
    Fault("images of a batch change places", "images", _images_of_another),
    Fault("embeddings stay in the graph's memory", "images", _no_copies),
)
"""Faults of vision graphs, each with what the proof says of it."""


def rounds_until(rounds: Iterator[Any], name: str) -> list[Any]:
    """The rounds up to one, and of those before it only what it needs."""
    found = []
    for each in rounds:
        found.append(each)
        if each.name == name:
            break
    alone = name in ("prompts", "seeds")
    return found[-1:] if alone else found

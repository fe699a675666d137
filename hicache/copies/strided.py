"""2D copies between consecutive blocks and consecutive slots.

In vLLM's usual layout a layer's bytes lie block after block, while a slot on the host holds all
layers of one block. So one layer of ``n`` consecutive blocks and slots consists of ``n`` rows of
equal width. On the device they are a block's stride apart, on the host a slot's length. A copy
engine copies such rows in one call: a 2D copy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

import numpy as np

from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.messages.operation import CacheOperation, PoolTransfer
from vllm_graft.hicache.pages.layout import Addresses, LayerPages, stacked

LEAST_BYTES = 2 << 20
"""Least bytes of a 2D copy. Smaller ones are no faster than the other methods."""

RangeCopy = Callable[[int, int], None]
"""``(begin, end)``: makes or enqueues this range of prepared copies, on the current stream."""


@dataclass(frozen=True)
class HostShard:
    """The slots of this rank's shard, from the ``address`` of slot 0, ``slot_bytes`` apart.
    ``pinned_slots`` slots are one piece of memory that is pinned at once."""

    address: int
    slot_bytes: int
    pinned_slots: int

    @classmethod
    def of(cls, pool: HostPool, shard: int) -> Self:
        """The slots of one shard of a pool."""
        return cls(pool.shard_address(shard), pool.shape.slot_bytes, pool.shape.pinned_slots)


@dataclass(frozen=True)
class StridedCopies:
    """``n`` 2D copies, all attributes int64 ``[n]``. ``device`` and ``host`` are addresses of the
    first row, pitches are bytes from one row to the next, and ``width`` is bytes per row."""

    device: Addresses
    host: Addresses
    device_pitch: Addresses
    host_pitch: Addresses
    width: Addresses
    rows: Addresses

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        return int((self.width * self.rows).sum())


@dataclass(frozen=True)
class Columns:
    """The ``n`` contiguous pieces of a pool's page. A column is one piece of all pages.

    Attributes:
        device: int64 ``[n]``, address of the piece in block 0.
        pitch: int64 ``[n]``, bytes from one block to the next.
        host: int64 ``[n]``, offset of the piece in a slot, in bytes.
        width: int64 ``[n]``, bytes of the piece.
        layers: range ``(begin, end)`` of each layer's columns; empty if layers may be merged.
    """

    device: Addresses
    pitch: Addresses
    host: Addresses
    width: Addresses
    layers: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, layers: Sequence[LayerPages], merged: bool = False) -> Self:
        """The columns of a pool's pages. If ``merged``, columns that are adjacent on both sides are
        one, also of several layers."""
        found: list[tuple[int, int, int, int]] = []
        ranges: dict[str, tuple[int, int]] = {}
        for layer in layers:
            begin = len(found)
            for offset, host, width in layer.runs:
                column = (layer.address + offset, layer.block_stride, host, width)
                last = found[-1] if merged and found else (0, 0, 0, 0)
                if last[3] and (last[0] + last[3], last[1], last[2] + last[3]) == column[:3]:
                    found[-1] = *last[:3], last[3] + width
                else:
                    found.append(column)
            ranges[layer.name] = begin, len(found)
        table = np.array(found, np.int64).reshape(-1, 4).T
        return cls(table[0], table[1], table[2], table[3], {} if merged else ranges)

    def __len__(self) -> int:
        return len(self.width)

    def least_rows(self, max_pitch: int) -> int | None:
        """The least number of rows for which 2D copies pay. It is None if they are impossible, or
        needless because the columns are wide. ``max_pitch`` is the most bytes between two rows that
        the device supports."""
        fits = bool(((self.width <= self.pitch) & (self.pitch <= max_pitch)).all())
        if not len(self) or not fits or self.width.mean() >= LEAST_BYTES:
            return None
        return int(-(-LEAST_BYTES // self.width.mean()))

    def addresses(
        self, blocks: Addresses, slots: Addresses, shard: HostShard
    ) -> tuple[Addresses, Addresses]:
        """Addresses on the device and on the host, column after column, int64 ``[columns * n]``."""
        device = self.device[:, None] + self.pitch[:, None] * blocks
        host = shard.address + self.host[:, None] + shard.slot_bytes * slots
        return device.ravel(), host.ravel()

    def copies(self, runs: "Runs", shard: HostShard) -> StridedCopies:
        """One 2D copy for each column and run, column after column."""
        shape = len(self), len(runs)
        sizes = (self.pitch[:, None], np.int64(shard.slot_bytes), self.width[:, None], runs.rows)
        return StridedCopies(
            *self.addresses(runs.blocks, runs.slots, shard),
            *(np.broadcast_to(size, shape).ravel() for size in sizes),
        )


@dataclass(frozen=True)
class Runs:
    """``n`` runs of ``rows`` pairs in which both block and slot ascend by one, from these on. All
    are int64 ``[n]``."""

    blocks: Addresses
    slots: Addresses
    rows: Addresses

    def __len__(self) -> int:
        return len(self.rows)


def split(
    transfer: PoolTransfer, least_rows: int, pinned_slots: int
) -> tuple[Runs | None, PoolTransfer]:
    """Split a transfer, whose pairs come in any order, into its long runs and the other pairs. No
    run crosses the border between two pieces of memory that are pinned at once."""
    blocks = np.asarray(transfer.device_indices, np.int64)
    slots = np.asarray(transfer.host_indices, np.int64)
    if len(blocks) < least_rows:
        return None, transfer
    # All pairs of a run have the same difference, even if a slot goes to several blocks.
    order = np.lexsort((slots, blocks - slots))
    blocks, slots = blocks[order], slots[order]
    follows = (np.diff(blocks) == 1) & (np.diff(slots) == 1) & (slots[1:] % pinned_slots != 0)
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    rows = np.diff(starts, append=len(blocks))
    long = rows >= least_rows
    if not long.any():
        return None, transfer
    short = ~np.repeat(long, rows)
    rest = PoolTransfer(transfer.group, slots[short].tolist(), blocks[short].tolist())
    return Runs(blocks[starts[long]], slots[starts[long]], rows[long]), rest


PoolColumns = Mapping[tuple[int, bool], tuple[Columns, int]]
"""Maps a group's number, and whether layers are copied one by one, to columns and least rows."""

PlannedCopies = TypeVar("PlannedCopies")


@dataclass(frozen=True)
class CopyPlan(Generic[PlannedCopies]):
    """The part of an operation that one method copies, and the ``rest`` for another method.
    ``ranges`` has ``(begin, end)`` of each layer's copies, unless layers are merged."""

    copies: PlannedCopies
    ranges: Mapping[str, tuple[int, int]]
    rest: CacheOperation | None


StridedPlan = CopyPlan[StridedCopies]


class StridedPlanner:
    """Finds the part of an operation for which 2D copies pay, which is in pools of ``columns``."""

    def __init__(
        self, pools: Mapping[int, Sequence[LayerPages]], shard: HostShard, max_pitch: int
    ) -> None:
        self._shard = shard
        self.columns: dict[tuple[int, bool], tuple[Columns, int]] = {}
        for group, layers in pools.items():
            for by_layer in (False, True):
                columns = Columns.of(layers, merged=not by_layer)
                least = columns.least_rows(max_pitch) if shard.slot_bytes <= max_pitch else None
                if least is not None:
                    self.columns[group, by_layer] = columns, least

    def plan(self, operation: CacheOperation, by_layer: bool = False) -> StridedPlan | None:
        """Plan the 2D copies of ``operation``; None if none pays."""
        copies: list[StridedCopies] = []
        ranges: dict[str, tuple[int, int]] = {}
        rest: list[PoolTransfer] = []
        end = 0
        for transfer in operation.transfers:
            if (pool := self.columns.get((transfer.group, by_layer))) is not None:
                columns, least = pool
                runs, transfer = split(transfer, least, self._shard.pinned_slots)
                if runs is not None:
                    copies.append(columns.copies(runs, self._shard))
                    for name, (first, last) in columns.layers.items():
                        ranges[name] = end + first * len(runs), end + last * len(runs)
                    end += len(columns) * len(runs)
            if len(transfer):
                rest.append(transfer)
        if not copies:
            return None
        left = replace(operation, transfers=rest) if rest else None
        return CopyPlan(stacked(copies), ranges, left)

"""Copies of rows at equal distances: blocks that follow each other, to slots that do so too.

vLLM's usual layout has the bytes of a layer block after block, a slot of the host has all layers of
one block. So a layer's part of ``n`` such blocks is ``n`` rows of equal width, a block's stride
apart on the device and a slot's on the host: what a copy engine takes in one call, as a 2D copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from vllm_graft.hicache.messages.operation import CacheOperation, Direction, PoolTransfer
from vllm_graft.hicache.pages.layout import Addresses, LayerPages

LEAST_BYTES = 2 << 20
"""Of a 2D copy that is worth a call of its own: below, other ways are as fast or faster.

By rows of 64 KiB, beside memcpy (H200, to and from the device): 512 reach 0.998 and 0.983, 128
0.983 and 0.973, 32 (this) 0.93 and 0.93, 16 0.87 and 0.88, 4 0.62. The kernel of ``page_kernel``
reaches 0.92, cuMemcpyBatchAsync 0.78 to 0.95 by how busy the host is.
"""


@dataclass(frozen=True)
class StridedCopies:
    """2D copies, int64 ``[n]`` each.

    Attributes:
        device: address of the first row on the device.
        host: the same on the host.
        device_pitch: bytes from a row to the next on the device.
        host_pitch: the same on the host.
        width: bytes of a row.
        rows: their number.
    """

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
        """Bytes of all copies."""
        return int((self.width * self.rows).sum())


class StridedDriver(Protocol):
    """Makes 2D copies, see :class:`~vllm_graft.hicache.copies.cuda_driver.CudaDriver`."""

    max_pitch: int

    def prepare(self, copies: StridedCopies, direction: Direction) -> Callable[[int, int], None]:
        """What enqueues a range of the copies."""


@dataclass(frozen=True)
class Columns:
    """Contiguous bytes of a pool's page, at the same place in each block and slot; int64 ``[n]``.

    Attributes:
        device: address in block 0.
        pitch: bytes from a block to the next.
        host: bytes from the start of a slot.
        width: bytes.
        layers: by name, the range of the layer's columns; empty where layers are merged.
    """

    device: Addresses
    pitch: Addresses
    host: Addresses
    width: Addresses
    layers: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, layers: Sequence[LayerPages], merged: bool = False) -> Columns:
        """Those of a pool's pages.

        Args:
            layers: all layers of the pool.
            merged: whether to join what is adjacent on both sides, of several layers too.
        """
        found: list[tuple[int, int, int, int]] = []
        ranges: dict[str, tuple[int, int]] = {}
        for layer in layers:
            begin = len(found)
            for offset, host, width in layer.runs:
                column = (layer.address + offset, layer.block_stride, host, width)
                joined = _joined(found[-1], column) if merged and found else None
                if joined is not None:
                    found[-1] = joined
                else:
                    found.append(column)
            ranges[layer.name] = begin, len(found)
        table = np.array(found, np.int64).reshape(-1, 4).T
        return cls(table[0], table[1], table[2], table[3], {} if merged else ranges)

    def __len__(self) -> int:
        return len(self.width)

    def least_rows(self, max_pitch: int) -> int | None:
        """Rows from which 2D copies pay; None where they cannot be, or a page is long enough.

        Args:
            max_pitch: the device's limit, bytes.
        """
        fits = bool(((self.width <= self.pitch) & (self.pitch <= max_pitch)).all())
        if not len(self) or not fits or self.width.mean() >= LEAST_BYTES:
            return None
        return int(-(-LEAST_BYTES // self.width.mean()))

    def copies(self, runs: Runs, slot_bytes: int, host_address: int) -> StridedCopies:
        """One for each column and run, column after column."""
        shape = len(self), len(runs)
        device = self.device[:, None] + self.pitch[:, None] * runs.blocks
        host = host_address + self.host[:, None] + slot_bytes * runs.slots
        columns = (self.pitch[:, None], np.int64(slot_bytes), self.width[:, None], runs.rows)
        return StridedCopies(
            device.ravel(), host.ravel(), *(np.broadcast_to(c, shape).ravel() for c in columns)
        )


def _joined(
    last: tuple[int, int, int, int], column: tuple[int, int, int, int]
) -> tuple[int, int, int, int] | None:
    """Both as one column, if they are adjacent in blocks and slots."""
    address, pitch, host, width = last
    if (address + width, pitch, host + width) != column[:3]:
        return None
    return address, pitch, host, width + column[3]


@dataclass(frozen=True)
class Runs:
    """Where both block and slot go up by one, int64 ``[n]`` each.

    Attributes:
        blocks: the first block of each.
        slots: its slot.
        rows: pairs of a block and a slot.
    """

    blocks: Addresses
    slots: Addresses
    rows: Addresses

    def __len__(self) -> int:
        return len(self.rows)


def split(
    transfer: PoolTransfer, least_rows: int, pinned_slots: int
) -> tuple[Runs | None, PoolTransfer]:
    """The long runs of a transfer, and what is not in them.

    Args:
        transfer: in any order.
        least_rows: of a run that is long enough.
        pinned_slots: slots that CUDA knows as one piece of memory; no run goes across.
    """
    blocks = np.asarray(transfer.device_indices, np.int64)
    slots = np.asarray(transfer.host_indices, np.int64)
    if len(blocks) < least_rows:
        return None, transfer
    # Pairs of one run have the same difference, also where a slot goes to several blocks.
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
"""By group, and by whether layers are copied apart: columns, and rows from which copies pay."""

LongRuns = TypeVar("LongRuns", bound=Sized)
Split = Callable[[PoolTransfer, int, int], tuple[LongRuns | None, PoolTransfer]]
"""As :func:`split`: what of a transfer is long enough, and the rest."""


CopiesOfPart = TypeVar("CopiesOfPart")


@dataclass(frozen=True)
class PlannedPart(Generic[CopiesOfPart]):
    """The part of an operation that goes one way.

    Attributes:
        copies: all of them.
        ranges: by name, the range of each layer's; empty where layers are merged.
        rest: what has to be copied in another way; None if nothing.
    """

    copies: CopiesOfPart
    ranges: Mapping[str, tuple[int, int]]
    rest: CacheOperation | None


def take(
    operation: CacheOperation,
    by_layer: bool,
    pools: PoolColumns,
    pinned_slots: int,
    split: Split[LongRuns],
) -> PlannedPart[list[tuple[Columns, LongRuns]]]:
    """Split every transfer whose pool has columns.

    The copies are yet to be made: of a pool, its columns with what each of them copies. Ranges
    count these one after the other, column by column.

    Args:
        operation: what to copy.
        by_layer: whether the ranges of layers are wanted.
        pools: those that the way of copying is good for.
        pinned_slots: slots that CUDA knows as one piece of memory.
        split: finds what is long enough.
    """
    found: list[tuple[Columns, LongRuns]] = []
    ranges: dict[str, tuple[int, int]] = {}
    rest: list[PoolTransfer] = []
    end = 0
    for transfer in operation.transfers:
        if (pool := pools.get((transfer.group, by_layer))) is not None:
            columns, least = pool
            runs, transfer = split(transfer, least, pinned_slots)
            if runs is not None:
                found.append((columns, runs))
                for name, (first, last) in columns.layers.items():
                    ranges[name] = end + first * len(runs), end + last * len(runs)
                end += len(columns) * len(runs)
        if len(transfer):
            rest.append(transfer)
    return PlannedPart(found, ranges, replace(operation, transfers=rest) if rest else None)


StridedPart = PlannedPart[StridedCopies]


class StridedPlanner:
    """Finds what of an operation 2D copies can do.

    Args:
        pools: where the pages of each group are on the device.
        slot_bytes: bytes from a slot to the next.
        host_address: of slot 0.
        pinned_slots: slots that CUDA knows as one piece of memory.
        max_pitch: the device's limit, bytes.

    Attributes:
        columns: by group, and by whether layers are copied apart: columns of the pool, and the rows
            from which 2D copies pay; only where they do.
    """

    def __init__(
        self,
        pools: Mapping[int, Sequence[LayerPages]],
        slot_bytes: int,
        host_address: int,
        pinned_slots: int,
        max_pitch: int,
    ) -> None:
        self._host = slot_bytes, host_address
        self._pinned_slots = pinned_slots
        self.columns: dict[tuple[int, bool], tuple[Columns, int]] = {}
        for group, layers in pools.items():
            for by_layer in (False, True):
                columns = Columns.of(layers, merged=not by_layer)
                least = columns.least_rows(max_pitch) if slot_bytes <= max_pitch else None
                if least is not None:
                    self.columns[group, by_layer] = columns, least

    def plan(self, operation: CacheOperation, by_layer: bool = False) -> StridedPart | None:
        """What 2D copies do of ``operation``; None if nothing.

        Args:
            operation: what to copy.
            by_layer: whether the ranges of layers are wanted.
        """
        taken = take(operation, by_layer, self.columns, self._pinned_slots, split)
        if not taken.copies:
            return None
        copies = [columns.copies(runs, *self._host) for columns, runs in taken.copies]
        return PlannedPart(_concatenated(copies), taken.ranges, taken.rest)


def _concatenated(parts: Sequence[StridedCopies]) -> StridedCopies:
    names = [field.name for field in fields(StridedCopies)]
    return StridedCopies(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))

"""2D copies between consecutive blocks and consecutive slots.

In vLLM's usual layout a layer's bytes lie block after block, while a slot on the host holds all
layers of one block. So one layer of ``n`` consecutive blocks and slots consists of ``n`` rows of
equal width. On the device they are a block's stride apart, on the host a slot's length. A copy
engine copies such rows in one call: a 2D copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from vllm_graft.hicache.messages.operation import CacheOperation, Direction, PoolTransfer
from vllm_graft.hicache.pages.layout import Addresses, LayerPages

LEAST_BYTES = 2 << 20
"""Least bytes of a 2D copy. Smaller ones are no faster than the other methods.

Measured on an H200 with rows of 64 KiB, as fractions of memcpy's bandwidth to and from the device:
512 rows reach 0.998 and 0.983, 128 rows 0.983 and 0.973, 32 rows (this limit) 0.93 and 0.93, 16
rows 0.87 and 0.88, 4 rows 0.62. The kernel of ``page_kernel`` reaches 0.92, and cuMemcpyBatchAsync
0.78 to 0.95, depending on how busy the host is.
"""


@dataclass(frozen=True)
class StridedCopies:
    """``n`` 2D copies. All attributes are int64 ``[n]``.

    Attributes:
        device: address of the first row on the device.
        host: address of the first row on the host.
        device_pitch: bytes from one row to the next on the device.
        host_pitch: bytes from one row to the next on the host.
        width: bytes per row.
        rows: number of rows.
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
    """Makes 2D copies; see :class:`~vllm_graft.hicache.copies.cuda_driver.CudaDriver`."""

    max_pitch: int

    def prepare(self, copies: StridedCopies, direction: Direction) -> Callable[[int, int], None]:
        """Return a function ``(begin, end)`` that enqueues a range of the copies."""


@dataclass(frozen=True)
class Columns:
    """The ``n`` contiguous pieces of a pool's page. A column is one piece of all pages.

    Attributes:
        device: int64 ``[n]``, address of the piece in block 0.
        pitch: int64 ``[n]``, bytes from one block to the next.
        host: int64 ``[n]``, offset of the piece in a slot, in bytes.
        width: int64 ``[n]``, bytes of the piece.
        layers: range ``(begin, end)`` of the columns of each layer, by its name. Empty if columns
            of several layers may be merged.
    """

    device: Addresses
    pitch: Addresses
    host: Addresses
    width: Addresses
    layers: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, layers: Sequence[LayerPages], merged: bool = False) -> Columns:
        """The columns of a pool's pages.

        Args:
            layers: all layers of the pool.
            merged: whether to merge columns that are adjacent on both sides, also of several
                layers.
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
        """The least number of rows for which 2D copies pay.

        Args:
            max_pitch: most bytes between two rows that the device supports.

        Returns:
            Rows. None if 2D copies are impossible, or needless because the columns are wide.
        """
        fits = bool(((self.width <= self.pitch) & (self.pitch <= max_pitch)).all())
        if not len(self) or not fits or self.width.mean() >= LEAST_BYTES:
            return None
        return int(-(-LEAST_BYTES // self.width.mean()))

    def copies(self, runs: Runs, slot_bytes: int, host_address: int) -> StridedCopies:
        """One 2D copy for each column and run, column after column."""
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
    """Both columns as one, if they are adjacent in blocks and in slots; None otherwise."""
    address, pitch, host, width = last
    if (address + width, pitch, host + width) != column[:3]:
        return None
    return address, pitch, host, width + column[3]


@dataclass(frozen=True)
class Runs:
    """``n`` runs of pairs in which both block and slot ascend by one. All are int64 ``[n]``.

    Attributes:
        blocks: first block of each run.
        slots: first slot of each run.
        rows: number of pairs of each run.
    """

    blocks: Addresses
    slots: Addresses
    rows: Addresses

    def __len__(self) -> int:
        return len(self.rows)


def split(
    transfer: PoolTransfer, least_rows: int, pinned_slots: int
) -> tuple[Runs | None, PoolTransfer]:
    """Split a transfer into its long runs and the rest.

    Args:
        transfer: pairs of a block and a slot, in any order.
        least_rows: least number of rows of a long run.
        pinned_slots: slots per piece of memory that is pinned at once. No run crosses the border
            between two pieces.

    Returns:
        The long runs, or None if there are none, and the pairs that are in no long run.
    """
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
"""Maps ``(group number, by_layer)`` to the pool's columns and the least rows of a copy.

``by_layer`` says whether the layers are copied one by one.
"""

LongRuns = TypeVar("LongRuns", bound=Sized)
Split = Callable[[PoolTransfer, int, int], tuple[LongRuns | None, PoolTransfer]]
"""Splits a transfer into its long runs and the rest, as :func:`split` does."""


PlannedCopies = TypeVar("PlannedCopies")


@dataclass(frozen=True)
class CopyPlan(Generic[PlannedCopies]):
    """The part of an operation that one method copies.

    Attributes:
        copies: the copies of this part.
        ranges: range ``(begin, end)`` of the copies of each layer, by its name. Empty if layers are
            merged.
        rest: the part of the operation that another method has to copy; None if there is none.
    """

    copies: PlannedCopies
    ranges: Mapping[str, tuple[int, int]]
    rest: CacheOperation | None


def take(
    operation: CacheOperation,
    by_layer: bool,
    pools: PoolColumns,
    pinned_slots: int,
    split: Split[LongRuns],
) -> CopyPlan[list[tuple[Columns, LongRuns]]]:
    """Split every transfer of an operation whose pool has columns.

    Args:
        operation: the operation.
        by_layer: whether its layers are copied one by one.
        pools: columns of the pools for which this method pays.
        pinned_slots: slots per piece of memory that is pinned at once.
        split: splits a transfer into its long runs and the rest.

    Returns:
        For each pool its columns, with the runs that each column copies. Ranges count these copies
        pool by pool, column by column.
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
    return CopyPlan(found, ranges, replace(operation, transfers=rest) if rest else None)


StridedPlan = CopyPlan[StridedCopies]


class StridedPlanner:
    """Finds the part of an operation for which 2D copies pay.

    Args:
        pools: places of each group's pages on the device.
        slot_bytes: bytes from one slot to the next.
        host_address: address of slot 0.
        pinned_slots: slots per piece of memory that is pinned at once.
        max_pitch: most bytes between two rows that the device supports.

    Attributes:
        columns: see :data:`PoolColumns`. It lacks pools for which 2D copies never pay.
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

    def plan(self, operation: CacheOperation, by_layer: bool = False) -> StridedPlan | None:
        """Plan the 2D copies of ``operation``; None if none pays.

        Args:
            operation: the operation.
            by_layer: whether its layers are copied one by one.
        """
        taken = take(operation, by_layer, self.columns, self._pinned_slots, split)
        if not taken.copies:
            return None
        copies = [columns.copies(runs, *self._host) for columns, runs in taken.copies]
        return CopyPlan(_concatenated(copies), taken.ranges, taken.rest)


def _concatenated(parts: Sequence[StridedCopies]) -> StridedCopies:
    names = [field.name for field in fields(StridedCopies)]
    return StridedCopies(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))

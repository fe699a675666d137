"""The plan of staged loads: from consecutive slots, through buffers on the device, to any blocks.

A 2D copy (``strided``) needs blocks that ascend along with the slots, but vLLM chooses the blocks.
So 2D copies bring rows of consecutive slots into a contiguous buffer on the device, and from there
a kernel copies the rows to their blocks. The kernel runs at the speed of the device's own memory,
while the copy engine fills the next buffer. This module decides where each row lies in a buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from vllm_graft.hicache.copies.strided import (
    Columns,
    CopyPlan,
    HostShard,
    PoolColumns,
    StridedCopies,
    take,
)
from vllm_graft.hicache.messages.operation import CacheOperation, PoolTransfer
from vllm_graft.hicache.pages.layout import Addresses, Copies, stacked

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Buffers:
    """``count`` buffers of ``bytes`` bytes on the device, one after the other from ``address``.

    The chunks of a load use them in turn.
    """

    address: int
    bytes: int
    count: int


@dataclass(frozen=True)
class SlotRows:
    """``n`` pairs of a slot and a block, in the order of the slots, which are distinct.

    ``begins``, bool ``[n]``, says whether a run of consecutive slots begins here.
    """

    slots: Addresses
    blocks: Addresses
    begins: Flags

    def __len__(self) -> int:
        return len(self.slots)


def split_by_slot(
    transfer: PoolTransfer, least_rows: int, pinned_slots: int
) -> tuple[SlotRows | None, PoolTransfer]:
    """Split a transfer as :func:`~vllm_graft.hicache.copies.strided.split` does, but by slots.

    A slot that goes to several blocks is in a run for only one of them.
    """
    if len(transfer) < least_rows:
        return None, transfer
    slots = np.asarray(transfer.host_indices, np.int64)
    order = np.argsort(slots, kind="stable")
    slots, blocks = slots[order], np.asarray(transfer.device_indices, np.int64)[order]
    once = np.flatnonzero(np.diff(slots, prepend=-1))
    distinct = slots[once]
    begins = (np.diff(distinct, prepend=-2) != 1) | (distinct % pinned_slots == 0)
    rows = np.diff(np.flatnonzero(begins), append=len(distinct))
    long = np.repeat(rows >= least_rows, rows)
    if not long.any():
        return None, transfer
    taken = once[long]
    left = np.ones(len(slots), bool)
    left[taken] = False
    rest = PoolTransfer(transfer.group, slots[left].tolist(), blocks[left].tolist())
    return SlotRows(slots[taken], blocks[taken], begins[long]), rest


@dataclass(frozen=True)
class Chunk:
    """The part of a load that is in a buffer at one time.

    ``fill`` is the range of the 2D copies into it, ``empty`` that of the runs from it to blocks.
    """

    buffer: int
    fill: tuple[int, int]
    empty: tuple[int, int]


@dataclass(frozen=True)
class StagedCopies:
    """Copies to buffers (``fills``) and from there to blocks, chunk after chunk.

    In ``empties`` the buffers' addresses are in the field ``host``.
    """

    fills: StridedCopies
    empties: Copies
    chunks: list[Chunk]

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def num_bytes(self) -> int:
        """Bytes of the load. The two copies of a byte count once."""
        return self.empties.num_bytes


StagedPlan = CopyPlan[StagedCopies]


@dataclass(frozen=True)
class _Rows:
    """``n`` rows to copy, column by column, and within a column in the order of slots.

    Attributes:
        device, host: int64 ``[n]``, addresses.
        width: int64 ``[n]``, bytes.
        begins: bool ``[n]``, whether a 2D copy has to begin here.
        parts: bool ``[n]``, whether a chunk has to begin here. If layers are copied one by one,
            each layer begins with a chunk.
    """

    device: Addresses
    host: Addresses
    width: Addresses
    begins: Flags
    parts: Flags

    @classmethod
    def of(cls, columns: Columns, rows: SlotRows, shard: HostShard) -> _Rows:
        shape = len(columns), len(rows)
        parts = np.zeros(shape, bool)
        parts[[0, *(first for first, _ in columns.layers.values())], 0] = True
        begins = np.broadcast_to(rows.begins, shape)
        width = np.broadcast_to(columns.width[:, None], shape)
        device, host = columns.addresses(rows.blocks, rows.slots, shard)
        return cls(device, host, width.ravel(), begins.ravel(), parts.ravel())


class StagedPlanner:
    """Finds the part of a load for which staging pays, and plans its way through the buffers.

    The kernel needs addresses and sizes that are multiples of ``alignment`` bytes.
    """

    def __init__(
        self, columns: PoolColumns, shard: HostShard, alignment: int, buffers: Buffers
    ) -> None:
        self._shard = shard
        self._buffers = buffers
        self._columns = {
            key: (found, least)
            for key, (found, least) in columns.items()
            if found.width.max() <= buffers.bytes and _aligned(found, alignment)
        }
        widths = [found.width for found, _ in self._columns.values()]
        if widths:
            # A chunk contains all rows that start within its length, and rows start at multiples
            # of the unit. The length is such that the last of these rows still fits the buffer.
            self._unit = int(np.gcd.reduce(np.concatenate(widths)))
            widest = int(np.concatenate(widths).max())
            self._length = buffers.bytes // self._unit * self._unit + self._unit - widest

    @property
    def serves(self) -> bool:
        """Whether the rows of any pool fit into the buffers."""
        return bool(self._columns)

    def plan(self, load: CacheOperation, by_layer: bool = False) -> StagedPlan | None:
        """Plan the staged copies of ``load``; None if none pays."""
        taken = take(load, by_layer, self._columns, self._shard.pinned_slots, split_by_slot)
        if not taken.copies:
            return None
        rows = [_Rows.of(columns, rows, self._shard) for columns, rows in taken.copies]
        copies, starts = self._in_buffers(stacked(rows))
        edges = np.searchsorted(
            starts, np.array(list(taken.ranges.values()), np.int64).reshape(-1, 2)
        )
        ranges = {name: (begin, end) for name, (begin, end) in zip(taken.ranges, edges.tolist())}
        return CopyPlan(copies, ranges, taken.rest)

    def _in_buffers(self, rows: _Rows) -> tuple[StagedCopies, Addresses]:
        """The copies, and the first row of each chunk as int64 ``[chunks]``."""
        begins, offset = chunked(rows.width, rows.parts, self._length, self._unit)
        starts = np.flatnonzero(begins)
        lengths = np.diff(starts, append=len(begins))
        buffer = np.arange(len(starts)) % self._buffers.count
        first = self._buffers.address + buffer * self._buffers.bytes
        staged = np.repeat(first, lengths) + offset
        at = np.flatnonzero(begins | rows.begins)
        slot_bytes = np.full(len(at), self._shard.slot_bytes, np.int64)
        height = np.diff(at, append=len(begins))
        width = rows.width[at]
        fills = StridedCopies(staged[at], rows.host[at], width, slot_bytes, width, height)
        fill_edges = [*np.searchsorted(at, starts).tolist(), len(at)]
        empty_edges = [*starts.tolist(), len(begins)]
        chunks = [
            Chunk(number, fill, empty)
            for number, fill, empty in zip(
                buffer.tolist(), pairwise(fill_edges), pairwise(empty_edges), strict=True
            )
        ]
        return StagedCopies(fills, Copies(rows.device, staged, rows.width), chunks), starts


def chunked(width: Addresses, parts: Flags, length: int, unit: int) -> tuple[Flags, Addresses]:
    """Divide rows into chunks of whole rows.

    Args:
        width: int64 ``[n]``, bytes of each row, multiples of ``unit``.
        parts: bool ``[n]``, whether a chunk has to begin here. The first is True.
        length: most bytes from the start of a chunk's first row to the start of the next chunk.

    Returns:
        bool ``[n]``, whether a chunk begins here; int64 ``[n]``, bytes from the start of the row's
        chunk to the row.
    """
    first = np.flatnonzero(parts)
    rows = np.diff(first, append=len(width))
    start = np.cumsum(width) - width
    start -= np.repeat(start[first], rows)
    # All chunks of a part get about the same length. Otherwise the last one could be short, and
    # short copies are slow.
    whole = np.add.reduceat(width, first)
    even = -(-whole // -(-whole // length))
    number = start // np.repeat(-(-even // unit) * unit, rows)
    begins = parts | (np.diff(number, prepend=0) != 0)
    at = np.flatnonzero(begins)
    return begins, start - np.repeat(start[at], np.diff(at, append=len(width)))


def _aligned(columns: Columns, alignment: int) -> bool:
    together = np.bitwise_or.reduce(columns.device | columns.pitch | columns.width)
    return int(together) % alignment == 0

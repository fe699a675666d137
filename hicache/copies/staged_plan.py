"""The plan of staged loads: from consecutive slots, through buffers on the device, to any blocks.

A 2D copy (``strided``) needs blocks that ascend along with the slots, but vLLM chooses the blocks.
So 2D copies bring rows of consecutive slots into a contiguous buffer on the device, and from there
a kernel copies the rows to their blocks. The kernel runs at the speed of the device's own memory,
while the copy engine fills the next buffer. This module decides where each row lies in a buffer.

Layers that are copied together lie together in a slot, so one row has the pieces of all of them.
That makes few launches of the kernel, which takes multiprocessors from the step's own kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

from vllm_graft.hicache.copies import strided
from vllm_graft.hicache.copies.strided import (
    Columns,
    CopyPlan,
    HostShard,
    PoolColumns,
    StridedCopies,
)
from vllm_graft.hicache.messages.operation import CacheOperation, PoolTransfer
from vllm_graft.hicache.pages.layout import Addresses, Copies, stacked

Flags = npt.NDArray[np.bool_]

Batches = Sequence[Sequence[str]]
"""The names of layers that are copied together, batch after batch."""


@dataclass(frozen=True)
class Buffers:
    """``count`` buffers of ``bytes`` bytes on the device, one after the other from ``address``. The
    chunks of a load use them in turn."""

    address: int
    bytes: int
    count: int


@dataclass(frozen=True)
class SlotRows:
    """``n`` pairs of a slot and a block, in the order of the slots, which are distinct. ``begins``,
    bool ``[n]``, says whether a run of consecutive slots begins here."""

    slots: Addresses
    blocks: Addresses
    begins: Flags

    def __len__(self) -> int:
        return len(self.slots)


def split_by_slot(
    transfer: PoolTransfer, least_rows: int, pinned_slots: int
) -> tuple[SlotRows | None, PoolTransfer]:
    """Split a transfer as :func:`~vllm_graft.hicache.copies.strided.split` does, but by slots. A
    slot that goes to several blocks is in a run for only one of them."""
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
    """The part of a load that is in a buffer at one time. ``fill`` is the range of the 2D copies
    into it, ``empty`` that of the runs from it to blocks."""

    buffer: int
    fill: tuple[int, int]
    empty: tuple[int, int]


@dataclass(frozen=True)
class StagedCopies:
    """Copies to buffers (``fills``) and from there to blocks, chunk after chunk. In ``empties`` the
    buffers' addresses are in the field ``host``."""

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


Band = Sequence[int]
"""Columns that follow each other in a slot and are copied as one row, by their places."""


@dataclass(frozen=True)
class _Rows:
    """``n`` rows to copy, band by band, and within a band in the order of slots.

    Attributes:
        host: int64 ``[n]``, addresses.
        width: int64 ``[n]``, bytes.
        begins: bool ``[n]``, whether a 2D copy has to begin here.
        parts: bool ``[n]``, whether a chunk has to begin here.
        pieces: int64 ``[n]``, number of the row's pieces, which go to as many places on the device.
        device: int64 ``[pieces]``, address of each piece.
        offset: int64 ``[pieces]``, bytes from the start of the row to the piece.
        sizes: int64 ``[pieces]``, bytes.
    """

    host: Addresses
    width: Addresses
    begins: Flags
    parts: Flags
    pieces: Addresses
    device: Addresses
    offset: Addresses
    sizes: Addresses

    @classmethod
    def of(
        cls, columns: Columns, band: Band, opens: bool, rows: SlotRows, shard: HostShard
    ) -> Self:
        """The rows of one band. ``opens`` says whether a chunk has to begin with it."""
        place, count = np.array(band, np.int64), len(rows)
        sizes, offset = columns.width[place], columns.host[place] - columns.host[place[0]]
        device = columns.device[place] + columns.pitch[place] * rows.blocks[:, None]
        parts = np.zeros(count, bool)
        parts[0] = opens
        return cls(
            host=shard.address + columns.host[place[0]] + shard.slot_bytes * rows.slots,
            width=np.full(count, sizes.sum()), begins=rows.begins, parts=parts,
            pieces=np.full(count, len(place), np.int64), device=device.ravel(),
            offset=np.tile(offset, count), sizes=np.tile(sizes, count),
        )  # fmt: skip


class StagedPlanner:
    """Finds the part of a load for which staging pays, and plans its way through the buffers. The
    kernel needs addresses and sizes that are multiples of ``alignment`` bytes."""

    def __init__(
        self, columns: PoolColumns, shard: HostShard, alignment: int, buffers: Buffers
    ) -> None:
        self._shard, self._buffers = shard, buffers
        self._columns = {
            key: found
            for key, (found, _) in columns.items()
            if found.width.max() <= buffers.bytes and _aligned(found, alignment)
        }

    @property
    def serves(self) -> bool:
        """Whether the rows of any pool fit into the buffers."""
        return bool(self._columns)

    def plan(self, load: CacheOperation, batches: Batches = ()) -> StagedPlan | None:
        """Plan the staged copies of ``load``; None if none pays. ``batches`` are the names of the
        layers that are copied together, if they are copied one after the other. The plan's range of
        a batch's first layer has the copies of all."""
        found: list[_Rows] = []
        ranges: dict[str, tuple[int, int]] = {}
        rest: list[PoolTransfer] = []
        end = 0
        for transfer in load.transfers:
            columns = self._columns.get((transfer.group, bool(batches)))
            if columns is not None:
                bands = self._bands(columns, batches)
                count = sum(map(len, bands.values()))
                least = -(-strided.LEAST_BYTES * count // int(columns.width.sum()))
                rows, transfer = split_by_slot(transfer, least, self._shard.pinned_slots)
                if rows is not None:
                    for name, together in bands.items():
                        for place, band in enumerate(together):
                            found.append(_Rows.of(columns, band, place == 0, rows, self._shard))
                        begin, end = end, end + len(together) * len(rows)
                        ranges[name] = begin, end
            if len(transfer):
                rest.append(transfer)
        if not found:
            return None
        copies, starts = self._in_buffers(stacked(found))
        edges = np.searchsorted(starts, np.array(list(ranges.values()), np.int64))
        spans = {name: (begin, stop) for name, (begin, stop) in zip(ranges, edges.tolist())}
        return CopyPlan(copies, spans, replace(load, transfers=rest) if rest else None)

    def _bands(self, columns: Columns, batches: Batches) -> dict[str, list[list[int]]]:
        """The bands of each batch that has columns, by the name of its first layer. Without batches
        each column is a band, and all of them are together under no name."""
        if not batches:
            return {"": [[place] for place in range(len(columns))]}
        found: dict[str, list[list[int]]] = {}
        for batch in batches:
            names = [name for name in batch if name in columns.layers]
            places = [place for name in names for place in range(*columns.layers[name])]
            ends, bands = columns.host + columns.width, list[list[int]]()
            for place in places:
                band = bands[-1] if bands else [place]
                follows = ends[band[-1]] == columns.host[place]
                if follows and ends[place] - columns.host[band[0]] <= self._buffers.bytes:
                    band.append(place)
                else:
                    bands.append([place])
            if names:
                found[names[0]] = bands
        return found

    def _in_buffers(self, rows: _Rows) -> tuple[StagedCopies, Addresses]:
        """The copies, and the first row of each chunk as int64 ``[chunks]``."""
        # A chunk contains all rows that start within its length, and rows start at multiples of the
        # unit. The length is such that the last of these rows still fits the buffer.
        unit, widest = int(np.gcd.reduce(rows.width)), int(rows.width.max())
        length = self._buffers.bytes // unit * unit + unit - widest
        begins, offset = chunked(rows.width, rows.parts, length, unit)
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
        pieces = np.concatenate(([0], np.cumsum(rows.pieces)))
        empty_edges = [*pieces[starts].tolist(), len(rows.sizes)]
        chunks = [
            Chunk(number, fill, empty)
            for number, fill, empty in zip(
                buffer.tolist(), pairwise(fill_edges), pairwise(empty_edges), strict=True
            )
        ]
        empties = Copies(rows.device, np.repeat(staged, rows.pieces) + rows.offset, rows.sizes)
        return StagedCopies(fills, empties, chunks), starts


def chunked(width: Addresses, parts: Flags, length: int, unit: int) -> tuple[Flags, Addresses]:
    """Divide rows into chunks of whole rows.

    Args:
        width: int64 ``[n]``, bytes of each row, multiples of ``unit``.
        parts: bool ``[n]``, whether a chunk has to begin here. The first is True.
        length: most bytes from the start of a chunk's first row to the start of the next chunk.

    Returns:
        bool ``[n]``, whether a chunk begins here; int64 ``[n]``, bytes from its start to the row.
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

"""Loads by way of memory on the device: slots that follow each other, to blocks in any order.

A 2D copy (``strided``) wants blocks that go up where slots do, and who hands out blocks is vLLM. So
rows of consecutive slots come by 2D copies to a piece of contiguous memory on the device, and a
kernel brings them to their blocks from there: at the speed of the device's own memory, while the
copy engine goes on with the next piece. This file says which rows lie where in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_graft.hicache.copies.strided import Columns, PlannedPart, PoolColumns, StridedCopies, take
from vllm_graft.hicache.messages.operation import CacheOperation, PoolTransfer
from vllm_graft.hicache.pages.layout import Addresses, Copies

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Buffers:
    """Memory on the device that pieces of a load take turns in.

    Attributes:
        address: of the first.
        bytes: of each; they follow each other.
        count: their number.
    """

    address: int
    bytes: int
    count: int


@dataclass(frozen=True)
class SlotRows:
    """Pairs of a slot and a block in the order of slots, int64 ``[n]`` each.

    Attributes:
        slots: ascending, none twice.
        blocks: in any order.
        begins: bool ``[n]``: where the slot is not the one behind the last.
    """

    slots: Addresses
    blocks: Addresses
    begins: Flags

    def __len__(self) -> int:
        return len(self.slots)


def split_by_slot(
    transfer: PoolTransfer, least_rows: int, pinned_slots: int
) -> tuple[SlotRows | None, PoolTransfer]:
    """The long runs of a transfer's slots, and what is not in them.

    A slot that goes to several blocks is in a run for one of them only.

    Args:
        transfer: in any order.
        least_rows: of a run that is long enough.
        pinned_slots: slots that CUDA knows as one piece of memory; no run goes across.
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
    """What is in a buffer at a time.

    Attributes:
        buffer: its number.
        fill: the range of 2D copies that bring it.
        empty: the range of runs that take it to the blocks.
    """

    buffer: int
    fill: tuple[int, int]
    empty: tuple[int, int]


@dataclass(frozen=True)
class StagedCopies:
    """Copies by way of buffers, chunk after chunk.

    Attributes:
        fills: 2D copies from the host to buffers.
        empties: runs from buffers (which stand for the host here) to blocks.
        chunks: what is in a buffer at a time.
    """

    fills: StridedCopies
    empties: Copies
    chunks: list[Chunk]

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies, each counted once."""
        return self.empties.num_bytes


StagedPart = PlannedPart[StagedCopies]


@dataclass(frozen=True)
class _Rows:
    """Rows to copy, ``[n]`` each: those of a column one after the other, in the order of slots.

    Attributes:
        device: address of the row's bytes in their block.
        host: the same in their slot.
        width: bytes.
        begins: where a 2D copy has to begin.
        parts: where a chunk has to begin: at a layer, if they are copied apart.
    """

    device: Addresses
    host: Addresses
    width: Addresses
    begins: Flags
    parts: Flags

    @classmethod
    def of(cls, columns: Columns, rows: SlotRows, slot_bytes: int, host_address: int) -> _Rows:
        """All columns of a pool for some slots."""
        shape = len(columns), len(rows)
        device = columns.device[:, None] + columns.pitch[:, None] * rows.blocks
        host = host_address + columns.host[:, None] + slot_bytes * rows.slots
        parts = np.zeros(shape, bool)
        parts[[0, *(first for first, _ in columns.layers.values())], 0] = True
        begins = np.broadcast_to(rows.begins, shape)
        width = np.broadcast_to(columns.width[:, None], shape)
        return cls(device.ravel(), host.ravel(), width.ravel(), begins.ravel(), parts.ravel())


class StagedPlanner:
    """Finds what of a load may go by way of buffers, and where in them.

    Args:
        columns: by group, and by whether layers are copied apart: columns of the pool, and the rows
            from which 2D copies pay.
        slot_bytes: bytes from a slot to the next.
        host_address: of slot 0.
        pinned_slots: slots that CUDA knows as one piece of memory.
        alignment: bytes of which the kernel wants addresses and sizes to be multiples.
        buffers: where rows are in between.
    """

    def __init__(
        self,
        columns: PoolColumns,
        slot_bytes: int,
        host_address: int,
        pinned_slots: int,
        alignment: int,
        buffers: Buffers,
    ) -> None:
        self._host = slot_bytes, host_address
        self._pinned_slots = pinned_slots
        self._buffers = buffers
        self._columns = {
            key: (found, least)
            for key, (found, least) in columns.items()
            if found.width.max() <= buffers.bytes and _aligned(found, alignment)
        }
        widths = [found.width for found, _ in self._columns.values()]
        if widths:
            # Rows start at multiples of a unit, so that a chunk of this length, which ends behind
            # the last row that starts in it, fits.
            self._unit = int(np.gcd.reduce(np.concatenate(widths)))
            widest = int(np.concatenate(widths).max())
            self._length = buffers.bytes // self._unit * self._unit + self._unit - widest

    @property
    def serves(self) -> bool:
        """Whether any pool's rows fit."""
        return bool(self._columns)

    def plan(self, load: CacheOperation, by_layer: bool = False) -> StagedPart | None:
        """What of ``load`` goes by way of buffers; None if nothing.

        Args:
            load: what to copy.
            by_layer: whether the ranges of layers are wanted.
        """
        taken = take(load, by_layer, self._columns, self._pinned_slots, split_by_slot)
        if not taken.copies:
            return None
        rows = [_Rows.of(columns, rows, *self._host) for columns, rows in taken.copies]
        copies, starts = self._in_buffers(_concatenated(rows))
        edges = np.searchsorted(
            starts, np.array(list(taken.ranges.values()), np.int64).reshape(-1, 2)
        )
        ranges = {name: (begin, end) for name, (begin, end) in zip(taken.ranges, edges.tolist())}
        return PlannedPart(copies, ranges, taken.rest)

    def _in_buffers(self, rows: _Rows) -> tuple[StagedCopies, Addresses]:
        """The copies, and the first row of each chunk."""
        begins, offset = chunked(rows.width, rows.parts, self._length, self._unit)
        starts = np.flatnonzero(begins)
        lengths = np.diff(starts, append=len(begins))
        buffer = np.arange(len(starts)) % self._buffers.count
        first = self._buffers.address + buffer * self._buffers.bytes
        staged = np.repeat(first, lengths) + offset
        at = np.flatnonzero(begins | rows.begins)
        slot_bytes = np.full(len(at), self._host[0], np.int64)
        height = np.diff(at, append=len(begins))
        width = rows.width[at]
        fills = StridedCopies(staged[at], rows.host[at], width, slot_bytes, width, height)
        fill_edges = [*np.searchsorted(at, starts).tolist(), len(at)]
        empty_edges = [*starts.tolist(), len(begins)]
        chunks = [
            Chunk(number, fill, empty)
            for number, fill, empty in zip(
                buffer.tolist(), _pairs(fill_edges), _pairs(empty_edges), strict=True
            )
        ]
        return StagedCopies(fills, Copies(rows.device, staged, rows.width), chunks), starts


def chunked(width: Addresses, parts: Flags, length: int, unit: int) -> tuple[Flags, Addresses]:
    """Cut rows into chunks of whole rows.

    Args:
        width: bytes of each row, multiples of ``unit``.
        parts: bool ``[n]``: where a chunk has to begin; the first is one.
        length: of a chunk, bytes between the start of its first row and that of the next chunk's.
        unit: bytes.

    Returns:
        bool ``[n]``: where a chunk begins; int64 ``[n]``: bytes from its start to the row.
    """
    first = np.flatnonzero(parts)
    rows = np.diff(first, append=len(width))
    start = np.cumsum(width) - width
    start -= np.repeat(start[first], rows)
    # Of about equal length: the last one would be short, and short copies are slow.
    whole = np.add.reduceat(width, first)
    even = -(-whole // -(-whole // length))
    number = start // np.repeat(-(-even // unit) * unit, rows)
    begins = parts | (np.diff(number, prepend=0) != 0)
    at = np.flatnonzero(begins)
    return begins, start - np.repeat(start[at], np.diff(at, append=len(width)))


def _aligned(columns: Columns, alignment: int) -> bool:
    together = np.bitwise_or.reduce(columns.device | columns.pitch | columns.width)
    return int(together) % alignment == 0


def _concatenated(parts: list[_Rows]) -> _Rows:
    names = ("device", "host", "width", "begins", "parts")
    return _Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _pairs(edges: list[int]) -> Iterable[tuple[int, int]]:
    return itertools.pairwise(edges)

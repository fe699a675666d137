"""Where the bytes of a page lie: in a block of vLLM's KV cache, and in a slot of the host pool.
vLLM gives each layer a strided view of one allocation. Groups may overlay the same bytes, and only
the first dimension of a view is known to count blocks. So this module assumes no contiguity: it
derives from the strides which runs of bytes are contiguous."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from vllm_graft.base.errors import GraftError
from vllm_graft.hicache.pages.host_form import HostForm

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Addresses = npt.NDArray[np.int64]
Arrays = TypeVar("Arrays", bound="DataclassInstance")


@dataclass(frozen=True)
class LayerPages:
    """One layer's part of its group's pages. `address`: address of block 0 on the device.
    `block_stride`: bytes from one block to the next. `runs`: ``(device offset, host offset,
    bytes)`` of each contiguous run of a page, from the start of the block and of the slot. Bytes
    are the host's, which may keep another form."""

    name: str
    address: int
    block_stride: int
    runs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Copies:
    """Addresses on the device and on the host, and bytes on the host: int64 ``[n]`` each."""

    device: Addresses
    host: Addresses
    sizes: Addresses

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())


def page_runs(shape: Sequence[int], strides: Sequence[int], item: int) -> list[tuple[int, int]]:
    """The contiguous runs ``(offset, bytes)`` of one block of a view, by increasing offset.
    ``strides`` are in elements of ``item`` bytes. The first dimension counts blocks."""
    dims = sorted(
        ((stride * item, size) for size, stride in zip(shape[1:], strides[1:]) if size > 1),
    )
    run = item
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    offsets = [
        sum(stride * index for (stride, _), index in zip(dims, indices))
        for indices in itertools.product(*(range(size) for _, size in dims))
    ]
    return [(offset, run) for offset in sorted(offsets)]


def layer_order(name: str) -> tuple[int, str]:
    """Sort key that puts layer names in the order in which layers run: by their first number."""
    number = re.search(r"\d+", name)
    return (int(number.group()) if number else -1, name)


def group_layers(
    layers: Sequence[str],
    caches: Mapping[str, Any],
    num_blocks: int,
    form: HostForm | None = None,
) -> tuple[LayerPages, ...]:
    """Describe the pages of one group, by layer in the order in which layers run.

    A layer that shares the bytes of another one is left out. The first dimension of a layer's
    tensor counts blocks, or the parts into which the attention kernel divides blocks.
    ``form`` is K/V's on the host; None if it is the device's. Raises `GraftError` if a tensor's
    first dimension is no multiple of ``num_blocks``, or a run of the form's unit."""
    described: list[LayerPages] = []
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    host_offset = 0
    for name in sorted(layers, key=layer_order):
        cache = caches[name]
        if cache.shape[0] % num_blocks:
            raise GraftError(
                f"the KV cache of {name} has shape {tuple(cache.shape)}: its first dimension "
                f"should be a multiple of {num_blocks} blocks"
            )
        if cache.shape[0] != num_blocks:
            cache = cache.unflatten(0, (num_blocks, -1))
        identity = (cache.data_ptr(), tuple(cache.shape), tuple(cache.stride()))
        if identity in seen:
            continue
        seen.add(identity)
        runs, item = [], cache.element_size()
        for offset, size in page_runs(cache.shape, cache.stride(), item):
            size = size if form is None else form.num_bytes(size // item)
            runs.append((offset, host_offset, size))
            host_offset += size
        stride = cache.stride(0) * item
        described.append(LayerPages(name, cache.data_ptr(), stride, tuple(runs)))
    return tuple(described)


def pages_bytes(layers: Sequence[LayerPages]) -> int:
    """Bytes that a page of the group takes in a slot."""
    return sum(size for layer in layers for _, _, size in layer.runs)


def copies(
    layers: Sequence[LayerPages],
    blocks: Sequence[int],
    slots: Sequence[int],
    slot_bytes: int,
    host_address: int,
    pinned_slots: int,
) -> Copies:
    """Addresses of the pages of ``layers`` for pairs of a block and a slot. Runs that are adjacent
    on both sides are merged, but not across the border of two pinned pieces of ``pinned_slots``
    slots. So this is for a host with the device's bytes. ``host_address`` is that of slot 0."""
    found = _addresses(layers, blocks, slots, slot_bytes, host_address)
    device, host, sizes = (column.T.ravel() for column in found)
    border = (host - host_address) % (pinned_slots * slot_bytes) == 0
    joins = (device[:-1] + sizes[:-1] == device[1:]) & (host[:-1] + sizes[:-1] == host[1:])
    joins &= ~border[1:]
    if not joins.any():
        return Copies(device, host, sizes)
    starts = np.concatenate(([0], np.flatnonzero(~joins) + 1))
    return Copies(device[starts], host[starts], np.add.reduceat(sizes, starts))


def layer_copies(
    parts: Iterable[tuple[Sequence[LayerPages], Sequence[int], Sequence[int]]],
    slot_bytes: int,
    host_address: int,
) -> tuple[Copies, dict[str, tuple[int, int]]]:
    """Addresses of pages, one layer after the other. Nothing is merged. ``parts`` has for each
    group its layers, block ids, and one slot for each block. Returns all copies, and for each
    layer's name the range ``(begin, end)`` of its copies."""
    found: list[Copies] = []
    ranges: dict[str, tuple[int, int]] = {}
    end = 0
    for layers, blocks, slots in parts:
        columns = _addresses(layers, blocks, slots, slot_bytes, host_address)
        found.append(Copies(*(column.ravel() for column in columns)))
        for layer in layers:
            begin, end = end, end + len(layer.runs) * len(blocks)
            ranges[layer.name] = begin, end
    return stacked(found), ranges


def stacked(parts: Sequence[Arrays]) -> Arrays:
    """One dataclass of arrays that holds those of all ``parts``, of which there is at least one."""
    columns = zip(*([getattr(part, field.name) for field in fields(part)] for part in parts))
    return type(parts[0])(*map(np.concatenate, columns))


def _addresses(
    layers: Sequence[LayerPages],
    blocks: Sequence[int],
    slots: Sequence[int],
    slot_bytes: int,
    host_address: int,
) -> tuple[Addresses, Addresses, Addresses]:
    """Device address, host address and bytes of each run, int64 ``[runs, blocks]``."""
    runs = [
        (layer.address + device, layer.block_stride, host, size)
        for layer in layers
        for device, host, size in layer.runs
    ]
    base, stride, offset, size = np.array(runs, np.int64).reshape(-1, 4).T[:, :, None]
    device = base + stride * np.asarray(blocks, np.int64)
    host = host_address + offset + np.asarray(slots, np.int64) * slot_bytes
    return device, host, np.broadcast_to(size, host.shape)

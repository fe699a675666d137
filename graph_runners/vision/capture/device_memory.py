"""Device memory: the allocator's segments, a budget, and buffers that graphs share.

torch's CUDA caching allocator takes segments from the device, and a pool keeps them. Tensors of up
to 1 MiB share segments of 2 MiB, and tensors below 10 MiB share segments of 20 MiB. A larger tensor
gets a segment of its own, rounded up to 2 MiB (torch's notes on CUDA, "Memory management";
c10/core/AllocatorConfig.h)."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

MIB = 1 << 20
SMALL, LARGE = 2 * MIB, 20 * MIB
"""Bytes of a segment for small and for large tensors."""

_SMALL_TENSOR, _OWN_SEGMENT = 1 * MIB, 10 * MIB
_ROUND = 512


def segment_bytes(sizes: Iterable[int]) -> int:
    """Bytes of the segments that hold tensors of these sizes, if they are packed well."""
    small = large = own = 0
    for size in sizes:
        rounded = _up(size, _ROUND)
        if size <= _SMALL_TENSOR:
            small += rounded
        elif size < _OWN_SEGMENT:
            large += rounded
        else:
            own += _up(size, SMALL)
    return _up(small, SMALL) + _up(large, LARGE) + own


def scratch_bytes(peak: float) -> int:
    """Bytes of the segments for a pass that needs `peak` bytes at once, in tensors of any size."""
    large = 0 if peak <= _SMALL_TENSOR else _up(int(peak), LARGE)
    return large + 2 * SMALL  # Two small segments for the small tensors of such a pass.


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class ByteBudget:
    """Bytes by owner, within a limit. A shared pool is one owner, as it never shrinks."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.owners: Counter[str] = Counter()

    @property
    def used(self) -> int:
        return self.owners.total()

    @property
    def free(self) -> int:
        """Bytes left; negative if more than the limit is used."""
        return self.limit - self.used


class Arena:
    """Static buffers, one per name, dtype and shape of a row, which each replay writes anew. A
    buffer that is too small is replaced; graphs that were captured with it keep it alive."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}
        self._outgrown: list[int] = []

    @property
    def sizes(self) -> list[int]:
        """Bytes of each buffer, including replaced ones, which graphs may still hold."""
        return [*self._outgrown, *(int(buffer.nbytes) for buffer in self._buffers.values())]

    def missing(self, name: str, rows: int, like: torch.Tensor) -> int:
        """Bytes that :meth:`rows` would allocate for the same arguments."""
        buffer = self._buffers.get(_kind(name, like))
        if buffer is not None and buffer.shape[0] >= rows:
            return 0
        return rows * int(like[:1].nbytes) if like.shape[0] else 0

    def rows(self, name: str, rows: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer ``[rows, *like.shape[1:]]`` of `like`'s dtype; a new one is zero."""
        kind = _kind(name, like)
        buffer = self._buffers.get(kind)
        if buffer is None or buffer.shape[0] < rows:
            if buffer is not None:
                self._outgrown.append(int(buffer.nbytes))
            buffer = torch.zeros(rows, *like.shape[1:], dtype=like.dtype, device=self._device)
            self._buffers[kind] = buffer
        return buffer[:rows]

    def clear(self) -> None:
        self._buffers.clear()
        self._outgrown.clear()


def _kind(name: str, like: torch.Tensor) -> tuple[Any, ...]:
    return name, like.dtype, tuple(like.shape[1:])

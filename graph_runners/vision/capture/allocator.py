"""How much device memory torch's CUDA caching allocator takes for tensors of given sizes.

The allocator takes segments from the device, and a pool keeps them. Tensors of up to 1 MiB share
segments of 2 MiB, and tensors below 10 MiB share segments of 20 MiB. A larger tensor gets a segment
of its own, rounded up to 2 MiB (torch's notes on CUDA, "Memory management";
c10/core/AllocatorConfig.h).
"""

from __future__ import annotations

from collections.abc import Iterable

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
    """Bytes of the segments for a pass that needs `peak` bytes at once, in tensors of any size.

    Two small segments are added for the small tensors of such a pass.
    """
    if peak <= _SMALL_TENSOR:
        return 2 * SMALL
    return _up(int(peak), LARGE) + 2 * SMALL


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit

"""Pages that the host keeps as e4m3: a byte for each element of the device's K/V, without a scale.

e4m3 (OCP 8-bit floating point) is rounded to the nearest, ties to even, and saturates: whatever is
over 448, infinities included, becomes 448. NaN stays NaN. There and back again is exact.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from vllm_graft.hicache.messages.operation import Direction
from vllm_graft.hicache.pages.layout import Copies

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def memory_copy(
    dtype: torch.dtype, runs: Copies, direction: Direction
) -> Callable[[int, int], None]:
    """What converts ranges of runs with the CPU, before it returns.

    Args:
        dtype: of the device's elements.
        runs: sizes are the host's bytes, one an element.
        direction: to the host, or back.
    """

    def copy(begin: int, end: int) -> None:
        columns = (column[begin:end].tolist() for column in (runs.device, runs.host, runs.sizes))
        for device, host, count in zip(*columns):
            there = _elements(device, count, dtype)
            here = _elements(host, count, torch.float8_e4m3fn)
            if direction is Direction.STORE:
                # Torch's own cast has saturated only in some versions.
                here.copy_(there.clamp(-LARGEST, LARGEST))
            else:
                there.copy_(here)

    return copy


def _elements(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)

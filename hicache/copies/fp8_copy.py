"""Copies by the CPU between K/V on the device and e4m3 on the host.

e4m3 is OCP's 8-bit floating point: one byte per element, here without a scale. Values are rounded
to the nearest, ties to even. They saturate: what is over 448, infinities included, becomes 448.
NaN stays NaN. The way back from e4m3 is exact.
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
    """Prepare converting copies by the CPU.

    Args:
        dtype: dtype of the device's elements.
        runs: runs to copy. Their sizes are bytes on the host, one per element.
        direction: to the host, or to the device.

    Returns:
        A function ``(begin, end)`` that copies a range of the runs before it returns.
    """

    def copy(begin: int, end: int) -> None:
        columns = (column[begin:end].tolist() for column in (runs.device, runs.host, runs.sizes))
        for device, host, count in zip(*columns):
            there = _elements(device, count, dtype)
            here = _elements(host, count, torch.float8_e4m3fn)
            if direction is Direction.STORE:
                # Torch's own cast saturates only in some versions.
                here.copy_(there.clamp(-LARGEST, LARGEST))
            else:
                there.copy_(here)

    return copy


def _elements(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)

"""A libcuda that moves bytes with torch, so that the stream simulator sees it."""

import ctypes
from typing import Any

import numpy as np
import torch

from vllm_graft.hicache.copies.cuda_driver import DESCRIPTOR
from vllm_graft.hicache.messages.operation import Direction

INVALID_VALUE = 1


class PretendedCuda:
    """A stand-in for libcuda that makes CUDA's own checks.

    Attributes:
        copied: direction and rows of each copy.
        max_pitch: the limit of pitches.
        fails_at: number of the copy that is refused, from 1; 0 for none.
    """

    def __init__(self, max_pitch: int = 1 << 31) -> None:
        self.copied: list[tuple[Direction, int]] = []
        self.max_pitch = max_pitch
        self.fails_at = 0
        self._calls = 0

    def cuDeviceGet(self, handle: Any, device: Any) -> int:
        handle._obj.value = device.value + 40
        return 0 if device.value == 0 else 101

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, handle: Any) -> int:
        assert (attribute.value, handle.value) == (11, 40)
        value._obj.value = min(self.max_pitch, 2**31 - 1)
        return 0

    def cuGetErrorName(self, status: Any, name: Any) -> int:
        names = {1: b"CUDA_ERROR_INVALID_VALUE", 101: b"CUDA_ERROR_INVALID_DEVICE"}
        name._obj.value = names[status.value]
        return 0

    def cuMemcpy2DAsync_v2(self, address: int, stream: int) -> int:
        assert stream == torch.cuda.current_stream().cuda_stream
        raw = ctypes.string_at(address, DESCRIPTOR.itemsize)
        copy = {
            name: int(np.frombuffer(raw, DESCRIPTOR)[0][name]) for name in DESCRIPTOR.names or ()
        }
        self._calls += 1
        pitches = copy["from_pitch"], copy["to_pitch"]
        if self._calls == self.fails_at or max(pitches) > self.max_pitch:
            return INVALID_VALUE
        if min(pitches) < copy["width"] or any(copy[f"{s}_{n}"] for s in _SIDES for n in "xy"):
            return INVALID_VALUE
        way = {(1, 2): Direction.LOAD, (2, 1): Direction.STORE}[copy["from_type"], copy["to_type"]]
        self.copied.append((way, copy["height"]))
        source, target = (self._rows(copy, side) for side in _SIDES)
        target.copy_(source)
        return 0

    def _rows(self, copy: dict[str, int], side: str) -> torch.Tensor:
        """uint8 ``[height, width]``."""
        used, unused = ("host", "device") if copy[f"{side}_type"] == 1 else ("device", "host")
        assert copy[f"{side}_{unused}"] == copy[f"{side}_array"] == 0
        rows, width, pitch = copy["height"], copy["width"], copy[f"{side}_pitch"]
        whole = (ctypes.c_char * ((rows - 1) * pitch + width)).from_address(copy[f"{side}_{used}"])
        return torch.frombuffer(whole, dtype=torch.uint8).as_strided((rows, width), (pitch, 1))


_SIDES = ("from", "to")

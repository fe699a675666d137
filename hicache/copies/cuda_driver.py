"""2D copies by ``cuMemcpy2DAsync_v2`` of CUDA's driver library, as torch and vLLM offer none.
Source: CUDA Driver API, "Memory Management". The library is loaded when an engine starts on a GPU,
never on import."""

import ctypes
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from vllm_graft.base.errors import GraftError
from vllm_graft.hicache.copies.strided import RangeCopy, StridedCopies
from vllm_graft.hicache.messages.operation import Direction

LIBRARY = "libcuda.so.1"

_MAX_PITCH_ATTRIBUTE = 11
_HOST, _DEVICE = 1, 2
_SIDE = [(name, "u8") for name in ("x", "y", "type", "host", "device", "array", "pitch")]
_SIDE[2] = "type", "u4"

DESCRIPTOR = np.dtype(
    [
        *((f"{side}_{name}", kind) for side in ("from", "to") for name, kind in _SIDE),
        ("width", "u8"),
        ("height", "u8"),
    ],
    align=True,
)
"""The driver's struct ``CUDA_MEMCPY2D``: source, target, width in bytes, and number of rows."""


class CudaDriverError(GraftError):
    """A call of the driver failed."""


class CudaDriver:
    """CUDA's driver, for the device that is current in this thread and has this visible number. Its
    ``max_pitch`` is the most bytes from one row to the next, in both memories."""

    def __init__(self, library: Any, device: int) -> None:
        self._library = library
        self._copy = library.cuMemcpy2DAsync_v2
        handle, found = ctypes.c_int(), ctypes.c_int()
        self._check(library.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device)), "cuDeviceGet")
        attribute = ctypes.c_int(_MAX_PITCH_ATTRIBUTE)
        status = library.cuDeviceGetAttribute(ctypes.byref(found), attribute, handle)
        self._check(status, "cuDeviceGetAttribute")
        self.max_pitch = found.value

    @classmethod
    def load(cls, device: int) -> Self:
        """Load this machine's driver; CudaDriverError if there is none, or it does not answer."""
        try:
            library = ctypes.CDLL(LIBRARY)
            library.cuMemcpy2DAsync_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        except (OSError, AttributeError) as error:
            raise CudaDriverError(f"{LIBRARY} cannot be used: {error}") from None
        return cls(library, device)

    def prepare(self, copies: StridedCopies, direction: Direction) -> RangeCopy:
        """Prepare 2D copies, to be enqueued on the stream that is current then. The returned
        function raises CudaDriverError if the driver refuses. The calling thread needs the device's
        context, which it gets by using torch on that device."""
        import torch

        table = descriptors(copies, direction)
        # `enqueue` keeps the table alive. The driver reads a descriptor before its call returns.
        address, size = table.ctypes.data, table.itemsize

        def enqueue(begin: int, end: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for place in range(begin, end):
                status = self._copy(address + place * size, stream)
                if status:
                    self._check(status, f"cuMemcpy2DAsync of {table[place]}")

        return enqueue

    def _check(self, status: int, call: str) -> None:
        if status:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
            said = (name.value or b"no such error").decode()
            raise CudaDriverError(f"{call} failed with {status} ({said})")


def descriptors(copies: StridedCopies, direction: Direction) -> npt.NDArray[Any]:
    """The driver's descriptors, one :data:`DESCRIPTOR` per copy."""
    host, device = ("from", "to") if direction is Direction.LOAD else ("to", "from")
    table = np.zeros(len(copies), DESCRIPTOR)
    for side, kind, memory, pitch in (
        (host, _HOST, "host", copies.host_pitch),
        (device, _DEVICE, "device", copies.device_pitch),
    ):
        table[f"{side}_type"] = kind
        table[f"{side}_{memory}"] = getattr(copies, memory)
        table[f"{side}_pitch"] = pitch
    table["width"], table["height"] = copies.width, copies.rows
    return table

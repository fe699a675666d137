"""The interface of what captures and replays graphs.

A back end captures a *region*: a callable without arguments that returns a pytree of tensors. The
result lies at the same addresses after each replay. The next capture or replay of any region in the
pool may overwrite it, so the caller clones what it keeps.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Region = Callable[[], Any]


class Captured(ABC):
    """A captured region.

    Attributes:
        output: what the region returned; each replay writes it anew. It does not keep its memory
            alive: it is valid until another region of the pool is captured or replayed.
    """

    output: Any

    @abstractmethod
    def replay(self) -> None:
        """Run the region again, on the tensors that it was captured with."""

    @abstractmethod
    def reset(self) -> None:
        """Drop the graph; it cannot be replayed afterwards."""


class SideStream(ABC):
    """A second stream within a region, whose work the device may run at the same time."""

    @abstractmethod
    def run(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the second stream, after what the region has launched so far.

        Until `join`, nothing that `work` reads may be freed or written, and its result may not be
        read.

        Returns:
            what `work` returns.
        """

    @abstractmethod
    def join(self) -> None:
        """Let the region wait for all work of the second stream."""


class GraphBackend(ABC):
    """Captures regions into one shared memory pool.

    Attributes:
        device: the device of the tensors.
        reads_device: whether a region may read device values on the host (``tolist``, ``item``).
        overhead: bytes that captures take from the device once per process, whatever is captured.
        pools_static: whether :meth:`static` allocates from a pool of its own.
        reserved_static: bytes of that pool.
    """

    device: torch.device
    reads_device = False
    overhead = 0
    pools_static = False
    reserved_static = 0

    @abstractmethod
    def open(self, pool: Any) -> None:
        """Capture into this pool until `close`.

        Args:
            pool: a handle from torch; None makes one.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the pool. The caller has reset all captured regions before."""

    @abstractmethod
    def capture(self, region: Region) -> Captured:
        """Capture `region`, which the caller has run before with tensors of these shapes.

        Raises:
            Exception: whatever the region raises; no stream is left in capture mode.
        """

    @abstractmethod
    def reserved(self) -> int:
        """Bytes of device memory that torch's allocator holds, in use or not."""

    @abstractmethod
    def peak(self, region: Region) -> tuple[Any, int]:
        """Run `region`.

        Returns:
            its result, and the most bytes that it needed beyond those in use before.
        """

    @abstractmethod
    def hold(self, num_bytes: int) -> bool:
        """Take so many bytes from the device; False if it does not have them."""

    @abstractmethod
    def release(self) -> None:
        """Give back the bytes that `hold` took."""

    def side_stream(self, room: int) -> SideStream | None:
        """A second stream; None if there is none, or if it takes more than `room` bytes."""
        return None

    def host_block(self, num_bytes: int) -> torch.Tensor:
        """Host memory ``[num_bytes]`` of uint8 that the device can copy from and to.

        Raises:
            RuntimeError: if the host does not have it.
        """
        return torch.empty(num_bytes, dtype=torch.uint8)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Run the body on the stream of captures.

        cuBLAS keeps a workspace of 32 MiB for each stream that it was used on. vLLM captures on
        another stream, so without this the passes at the start would cost a second workspace.
        """
        yield

    @contextmanager
    def static(self) -> Iterator[None]:
        """Allocate the static buffers of graphs in the body.

        They must not lie in the pool, as replays write to memory there that seems free. They should
        not share segments with the rest of the process either, as a buffer that stays would keep
        such a segment from being given back.
        """
        yield

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device."""

    def timed(self, region: Region) -> tuple[Any, float]:
        """Run `region` on an idle device.

        Returns:
            its result, and the seconds until the device is done.
        """
        self.synchronize()
        start = time.perf_counter()
        result = region()
        self.synchronize()
        return result, time.perf_counter() - start

"""Where graphs are captured and replayed: on a CUDA device (`core.cuda`), or pretended on any.

A back end captures a callable without arguments, whose result (any pytree of tensors) lies at the
same addresses after each replay. The caller clones what it keeps before the next replay or capture
of any region in the pool: these may write there.
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
        output: what the region returned, written anew by each replay. It holds no memory of the
            pool: it is there until another region of the pool is captured or replayed.
    """

    output: Any

    @abstractmethod
    def replay(self) -> None:
        """Run the region again on the tensors that it saw at capture."""

    @abstractmethod
    def reset(self) -> None:
        """Drop the region; it cannot be replayed afterwards."""


class Beside(ABC):
    """A second line of work within a region, which the device may run at the same time."""

    @abstractmethod
    def run(self, work: Callable[[], Any]) -> Any:
        """What `work` returns, run after all that was asked for before, beside what comes after.

        Nothing that it reads may be freed or written, nor its result be read, before `join`.
        """

    @abstractmethod
    def join(self) -> None:
        """What comes after this comes after all of `run`."""


class GraphBackend(ABC):
    """Captures regions into one shared memory pool.

    Attributes:
        device: of the tensors.
        reads_device: whether a region may read device values on the host (``tolist``, ``item``).
        overhead: bytes that captures take from the device once in a process, whatever is captured.
        pools_static: whether :meth:`static` has memory of its own, counted by `reserved_static`.
    """

    device: torch.device
    reads_device = False
    overhead = 0
    pools_static = False
    reserved_static = 0

    @abstractmethod
    def open(self, pool: Any) -> None:
        """Use this pool, a handle of torch's, until `close`; None makes one."""

    @abstractmethod
    def close(self) -> None:
        """Let the pool go. The captured regions must have been reset."""

    @abstractmethod
    def capture(self, region: Region) -> Captured:
        """Capture `region`, which has run before with tensors of these shapes.

        Raises whatever the region raises, with nothing left under capture.
        """

    @abstractmethod
    def reserved(self) -> int:
        """Bytes of device memory that torch holds, in use or not."""

    @abstractmethod
    def peak(self, region: Region) -> tuple[Any, int]:
        """Run `region`; its result, and the bytes that it needed at most beyond those in use."""

    @abstractmethod
    def hold(self, num_bytes: int) -> bool:
        """Take so many bytes from the device, to show that they are there; False if they aren't."""

    @abstractmethod
    def release(self) -> None:
        """Give back what `hold` took."""

    def beside(self, room: int) -> Beside | None:
        """A second line of work; None where there is none, or it takes more than `room` bytes."""
        return None

    def host_block(self, num_bytes: int) -> torch.Tensor:
        """``[num_bytes]`` uint8 of host memory that the device copies from and to by itself."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """What runs in here, runs where captures do.

        cuBLAS keeps a workspace of 32 MiB for each stream that it was used on: passes at the start
        of an engine, which has a stream of its own for them, would cost another one.
        """
        yield

    @contextmanager
    def static(self) -> Iterator[None]:
        """What is allocated in here are static buffers of graphs.

        They share no memory with the pool, where replays write to what seems free, nor with the
        rest of the process: the segments of a buffer that stays could not be given back.
        """
        yield

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device."""

    def timed(self, region: Region) -> tuple[Any, float]:
        """Run `region` on an idle device; its result and seconds until it is done."""
        self.synchronize()
        start = time.perf_counter()
        result = region()
        self.synchronize()
        return result, time.perf_counter() - start

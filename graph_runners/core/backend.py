"""Where graphs are captured and replayed: on a CUDA device, or pretended on any.

A back end captures a callable without arguments, whose result (any pytree of tensors) lies at the
same addresses after each replay. The caller clones what it keeps before the next replay.
"""

from __future__ import annotations

import contextlib
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from vllm_graft.errors import GraftError

Region = Callable[[], Any]


class Captured(ABC):
    """A captured region.

    Attributes:
        output: what the region returned, written anew by each replay.
    """

    output: Any

    @abstractmethod
    def replay(self) -> None:
        """Run the region again on the tensors that it saw at capture."""

    @abstractmethod
    def reset(self) -> None:
        """Drop the region; it cannot be replayed afterwards."""


class GraphBackend(ABC):
    """Captures regions into one shared memory pool.

    Attributes:
        device: of the tensors.
        reads_device: whether a region may read device values on the host (``tolist``, ``item``).
    """

    device: torch.device
    reads_device = False

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


class _CudaGraph(Captured):
    def __init__(self, graph: Any, output: Any) -> None:
        self._graph, self.output = graph, output

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        # The output lies in the pool: dropping it lets a later capture use its memory.
        self.output = None
        self._graph.reset()


class CudaBackend(GraphBackend):
    """CUDA graphs, captured while the engine runs.

    ``torch.cuda.graph`` waits for the device, collects garbage and empties the allocator's cache
    before a capture. Here only the garbage collector is kept away (a graph that it frees under
    capture would invalidate the capture), and the mode is ``thread_local``: threads that copy
    outputs or K/V call CUDA meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        self._anchors: list[Captured] = []
        self._stream: torch.cuda.Stream | None = None
        self._held: torch.Tensor | None = None

    def open(self, pool: Any) -> None:
        """A graph of one kernel stays in the pool.

        The allocator drops a pool whose last graph is gone, and refuses its handle later.
        """
        self._pool = pool if pool is not None else torch.cuda.graph_pool_handle()
        cell = torch.zeros(16, 16, device=self.device)
        with self._side_stream():
            # Else cuBLAS would take its workspace for the stream out of the pool.
            torch.mm(cell, cell)
        self._anchors.append(self.capture(lambda: cell.add_(0)))

    def close(self) -> None:
        """Reset the anchors; the pools' memory goes back to the device."""
        for anchor in self._anchors:
            anchor.reset()
        self._anchors.clear()
        self._pool = self._held = None
        torch.cuda.empty_cache()

    def capture(self, region: Region) -> Captured:
        """Capture on the current stream, or on a stream of our own beside the default one."""
        if self._pool is None:
            self.open(None)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), self._side_stream(), no_gc():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = region()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        return _CudaGraph(graph, output)

    def _abandon(self, graph: Any) -> None:
        # The stream must leave capture mode; the capture is invalid already, so this may raise,
        # and then the allocator believes for good that a capture into the pool is going on. The
        # next capture opens another; graphs of the old one stay, as does its anchor.
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        self._pool = None
        with contextlib.suppress(RuntimeError):
            graph.reset()

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        """The default stream cannot be captured; vLLM's own graph capture is on another."""
        current = torch.cuda.current_stream(self.device)
        if current != torch.cuda.default_stream(self.device):
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def reserved(self) -> int:
        """Of torch's caching allocator, pools included."""
        return int(torch.cuda.memory_reserved(self.device))

    def peak(self, region: Region) -> tuple[Any, int]:
        """By the allocator's peak, which is reset."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = region()
        return result, torch.cuda.max_memory_allocated(self.device) - before

    def hold(self, num_bytes: int) -> bool:
        """One block of bytes."""
        try:
            self._held = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            return False
        return True

    def release(self) -> None:
        """To the device, not to the allocator's cache: a pool cannot use what is cached."""
        if self._held is not None:
            self._held = None
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """All streams of the device."""
        torch.cuda.synchronize(self.device)


class _Closure(Captured):
    def __init__(self, region: Region) -> None:
        self._region: Region | None = region
        with torch.inference_mode():
            self.output = region()

    def replay(self) -> None:
        if self._region is None:
            raise GraftError("replay() of a region that was reset")
        with torch.inference_mode():
            anew = pytree.tree_leaves(self._region())
            for old, new in zip(pytree.tree_leaves(self.output), anew, strict=True):
                old.copy_(new)

    def reset(self) -> None:
        self._region = None


class FakeBackend(GraphBackend):
    """Runs the region's Python again, on the tensors that it holds.

    What a graph freezes on a GPU, addresses and host numbers that were captured, is frozen here as
    well if the region keeps them in static buffers. So stale metadata, swapped tensors and wrong
    padding show on a CPU. The bytes that it reports are those of the regions' outputs.
    """

    reads_device = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.opened = False
        self.held = 0
        self.captures = 0
        self._bytes = 0

    def open(self, pool: Any) -> None:
        """Nothing to take."""
        self.opened = True

    def close(self) -> None:
        """Nothing to give back."""
        self.opened, self.held, self._bytes = False, 0, 0

    def capture(self, region: Region) -> Captured:
        """Run it once."""
        captured = _Closure(region)
        self.captures += 1
        self._bytes += num_bytes(captured.output)
        return captured

    def reserved(self) -> int:
        """Bytes of all outputs captured since `open`."""
        return self._bytes

    def peak(self, region: Region) -> tuple[Any, int]:
        """Of the result alone."""
        result = region()
        return result, num_bytes(result)

    def hold(self, num_bytes: int) -> bool:
        """Always there."""
        self.held = num_bytes
        return True

    def release(self) -> None:
        """Nothing is held."""
        self.held = 0

    def synchronize(self) -> None:
        """Nothing runs beside us."""

    def timed(self, region: Region) -> tuple[Any, float]:
        """Takes no time: what would be measured here says nothing of graphs."""
        return region(), 0.0


def make_backend(device: torch.device) -> GraphBackend:
    """The back end of a device.

    Raises:
        GraftError: if the device has no CUDA graphs.
    """
    if device.type == "cuda":
        return CudaBackend(device)
    raise GraftError(f"there are no CUDA graphs on the device {device}")


def num_bytes(tensors: Any) -> int:
    """Bytes of all tensors in a pytree."""
    leaves = pytree.tree_leaves(tensors)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


@contextmanager
def no_gc() -> Iterator[None]:
    """Keep the garbage collector from running on its own; collects nothing itself."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

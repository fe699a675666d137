"""CUDA graphs, and the memory that they take from torch's caching allocator."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from vllm_graft.base.errors import GraftError
from vllm_graft.graph_runners.vision.capture.capture_stream import CaptureStream, stream_of
from vllm_graft.graph_runners.vision.capture.graph_backend import (
    Beside,
    Captured,
    GraphBackend,
    Region,
)


class _CudaGraph(Captured):
    def __init__(self, graph: Any, output: Any) -> None:
        self._graph, self.output = graph, output

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self.output = None
        self._graph.reset()


class _Address:
    """Device memory by its address, which holds nothing (Numba's CUDA array interface)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which is not kept: later captures into the pool may use it.

    A tensor that is not dense, or empty, is given back as it is.
    """
    if not tensor.is_cuda or not tensor.is_contiguous() or tensor.nbytes == 0:
        return tensor
    raw = torch.as_tensor(_Address(tensor), device=tensor.device)
    if raw.data_ptr() != tensor.data_ptr():
        raise GraftError(f"torch copied {tensor.nbytes} bytes of {tensor.device} for a view")
    return raw.view(tensor.dtype).view(tensor.shape)


class CudaBackend(GraphBackend):
    """CUDA graphs, captured while the engine runs.

    ``torch.cuda.graph`` waits for the device, collects garbage and empties the allocator's cache
    before a capture. Here only the garbage collector is kept away (a graph that it frees under
    capture would invalidate the capture), and the mode is ``thread_local``: threads that copy
    outputs or K/V call CUDA meanwhile.
    """

    pools_static = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reserved_static = 0
        self._pool: Any = None
        self._static: Any = None
        self._anchors: list[Captured] = []
        self._wrecks: list[Any] = []
        self._held: torch.Tensor | None = None
        self._capture_stream = stream_of(device)
        self._second_stream: CaptureStream | None = None

    @property
    def overhead(self) -> int:  # type: ignore[override]
        """The workspace of cuBLAS for our stream: 32 MiB on Hopper. Twice that with `beside`."""
        streams = (self._capture_stream, self._second_stream)
        return sum(stream.workspace for stream in streams if stream is not None)

    def beside(self, room: int) -> Beside | None:
        """A stream to fork to; cuBLAS takes as much for it as it took for the first."""
        if self._capture_stream.workspace > room:
            return None
        self._second_stream = stream_of(self.device, 1)
        self._second_stream.warm()
        return self._second_stream

    def open(self, pool: Any) -> None:
        """A graph of one kernel stays in the pool.

        The allocator drops a pool whose last graph is gone, and refuses its handle later.
        """
        self._capture_stream.warm()
        self._static = torch.cuda.MemPool()
        self._open_pool(pool)

    def _open_pool(self, pool: Any) -> None:
        self._pool = pool if pool is not None else torch.cuda.graph_pool_handle()
        cell = torch.zeros(16, 16, device=self.device)
        self._anchors.append(self.capture(lambda: cell.add_(0)))

    def close(self) -> None:
        """Reset the anchors; the pools' memory goes back to the device."""
        for anchor in self._anchors:
            anchor.reset()
        self._anchors.clear()
        self._pool = self._held = self._static = None
        self.reserved_static = 0
        torch.cuda.empty_cache()

    def capture(self, region: Region) -> Captured:
        """Capture on a stream of our own."""
        if self._pool is None:
            # A failed capture has spoilt the last one; static buffers are as good as before.
            self._open_pool(None)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), self._capture_stream.use(), no_gc():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = region()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        return _CudaGraph(graph, pytree.tree_map_only(torch.Tensor, borrowed, output))

    def host_block(self, num_bytes: int) -> torch.Tensor:
        """Pinned."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Our capture stream, whose workspace is counted as `overhead`."""
        with self._capture_stream.use():
            yield

    @contextmanager
    def static(self) -> Iterator[None]:
        """Memory of a pool of our own; on the stream of captures, so that it is used again."""
        before, index = self.reserved(), self.device.index
        try:
            with self._capture_stream.use(), torch.cuda.use_mem_pool(self._static, index):
                yield
        finally:
            self.reserved_static += self.reserved() - before

    def _abandon(self, graph: Any) -> None:
        # The stream must leave capture mode; the capture is invalid already, so this may raise,
        # and then the allocator goes on believing in it: it would abort the process when a pool is
        # given back. The next capture opens another pool; graphs of this one stay, as its anchor.
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        self._pool = None
        with contextlib.suppress(RuntimeError):
            graph.reset()
        # The allocator may go on asking it whether a stream is being captured.
        self._wrecks.append(graph)

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
        """One block of bytes, beside nothing that the allocator keeps of passes that are over.

        vLLM takes what is gone from the device for the graphs'.
        """
        torch.cuda.empty_cache()
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

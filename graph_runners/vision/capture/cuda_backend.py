"""The back end of CUDA graphs, and the memory that they take from torch's caching allocator."""

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
    Captured,
    GraphBackend,
    Region,
    SideStream,
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
    """Device memory given by its address, which it does not keep alive.

    torch reads it through Numba's CUDA array interface.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor's memory that does not keep it alive.

    Later captures into the pool may then use that memory.

    Args:
        tensor: any tensor; if it is empty, not contiguous or not on a CUDA device, it is returned
            itself.

    Raises:
        GraftError: if torch copies instead of making a view.
    """
    if not tensor.is_cuda or not tensor.is_contiguous() or tensor.nbytes == 0:
        return tensor
    raw = torch.as_tensor(_Address(tensor), device=tensor.device)
    if raw.data_ptr() != tensor.data_ptr():
        raise GraftError(f"torch copied {tensor.nbytes} bytes of {tensor.device} for a view")
    return raw.view(tensor.dtype).view(tensor.shape)


class CudaBackend(GraphBackend):
    """CUDA graphs that are captured while the engine runs.

    ``torch.cuda.graph`` waits for the device, collects garbage and empties the allocator's cache
    before a capture, which would take long. This back end only stops the garbage collector, as a
    graph that it frees during a capture would invalidate the capture. The capture mode is
    ``thread_local``, as other threads call CUDA meanwhile to copy outputs or K/V.
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
        """Bytes of cuBLAS's workspaces for our streams: 32 MiB each on Hopper."""
        streams = (self._capture_stream, self._second_stream)
        return sum(stream.workspace for stream in streams if stream is not None)

    def side_stream(self, room: int) -> SideStream | None:
        """A stream to fork to; cuBLAS takes as much for it as for the first stream."""
        if self._capture_stream.workspace > room:
            return None
        self._second_stream = stream_of(self.device, 1)
        self._second_stream.warm()
        return self._second_stream

    def open(self, pool: Any) -> None:
        """Capture into this pool, where a graph of one kernel stays as an anchor.

        Without it, the allocator would drop the pool with its last graph, and later refuse the
        pool's handle.
        """
        self._capture_stream.warm()
        self._static = torch.cuda.MemPool()
        self._open_pool(pool)

    def _open_pool(self, pool: Any) -> None:
        self._pool = pool if pool is not None else torch.cuda.graph_pool_handle()
        cell = torch.zeros(16, 16, device=self.device)
        self._anchors.append(self.capture(lambda: cell.add_(0)))

    def close(self) -> None:
        """Reset the anchors, so that the pools' memory goes back to the device."""
        for anchor in self._anchors:
            anchor.reset()
        self._anchors.clear()
        self._pool = self._held = self._static = None
        self.reserved_static = 0
        torch.cuda.empty_cache()

    def capture(self, region: Region) -> Captured:
        if self._pool is None:
            # A failed capture has spoilt the last pool; static buffers are not affected.
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
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Run the body on the capture stream, whose workspace `overhead` counts."""
        with self._capture_stream.use():
            yield

    @contextmanager
    def static(self) -> Iterator[None]:
        """Allocate from a pool for static buffers, on the capture stream.

        The allocator gives freed memory only to the stream that it was allocated on.
        """
        before, index = self.reserved(), self.device.index
        try:
            with self._capture_stream.use(), torch.cuda.use_mem_pool(self._static, index):
                yield
        finally:
            self.reserved_static += self.reserved() - before

    def _abandon(self, graph: Any) -> None:
        # The stream has to leave capture mode. This may raise, as the capture is already invalid.
        # The allocator then still believes that it captures into the pool, and would abort the
        # process when a pool is given back, so it is told to stop. The next capture opens another
        # pool; the graphs of this pool and its anchor stay.
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        self._pool = None
        with contextlib.suppress(RuntimeError):
            graph.reset()
        # The allocator may still ask this graph whether a stream is being captured.
        self._wrecks.append(graph)

    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self.device))

    def peak(self, region: Region) -> tuple[Any, int]:
        """Run `region`, and read the allocator's peak, which is reset before."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = region()
        return result, torch.cuda.max_memory_allocated(self.device) - before

    def hold(self, num_bytes: int) -> bool:
        """Allocate one block, after the allocator has given back what finished passes left.

        vLLM profiles the memory of graphs by how much is gone from the device.
        """
        torch.cuda.empty_cache()
        try:
            self._held = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            return False
        return True

    def release(self) -> None:
        """Give the block back to the device, as a pool cannot use the allocator's cache."""
        if self._held is not None:
            self._held = None
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


@contextmanager
def no_gc() -> Iterator[None]:
    """Keep the garbage collector from running in the body, without collecting anything."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

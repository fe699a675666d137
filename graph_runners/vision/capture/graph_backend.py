"""Captures and replays CUDA graphs while the engine runs. A back end captures a *region*: a
callable without arguments that returns a pytree of tensors. The result lies at the same addresses
after each replay. The next capture or replay of any region in the pool may overwrite it, so the
caller clones what it keeps."""

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from vllm_graft.base.errors import GraftError

Region = Callable[[], Any]


class Captured:
    """A captured region, and its `output`, which each replay writes anew. The output does not keep
    its memory alive: it is valid until another region of the pool is captured or replayed."""

    def __init__(self, graph: Any, output: Any) -> None:
        self._graph, self.output = graph, output

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self.output = None
        self._graph.reset()


class _Address:
    """Device memory that it does not keep alive, as Numba's CUDA array interface."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor's memory that does not keep it alive: later captures may use it. A
    tensor that is empty, not contiguous or not on a CUDA device is returned itself. Raises
    `GraftError` if torch copies instead of making a view."""
    if not tensor.is_cuda or not tensor.is_contiguous() or tensor.nbytes == 0:
        return tensor
    raw = torch.as_tensor(_Address(tensor), device=tensor.device)
    if raw.data_ptr() != tensor.data_ptr():
        raise GraftError(f"torch copied {tensor.nbytes} bytes of {tensor.device} for a view")
    return raw.view(tensor.dtype).view(tensor.shape)


class CaptureStream:
    """A stream that captures run on or fork to; the default stream cannot be captured. cuBLAS takes
    a workspace for each stream and keeps it, so there are few: see :func:`stream_of`. `workspace`
    is its bytes, 0 before `warm`."""

    def __init__(self, device: torch.device) -> None:
        self.workspace = 0
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._warm = False

    def run(self, work: Callable[[], Any]) -> Any:
        """Run `work` after what the current stream has launched so far. Until `join`, nothing that
        `work` reads may be freed or written, and its result may not be read."""
        with self._forked():
            return work()

    def join(self) -> None:
        """Let the current stream wait for this one."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Make this the current stream; work before and after the body stays in order."""
        with self._forked():
            yield
        self.join()

    @contextmanager
    def _forked(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def warm(self) -> None:
        """Let cuBLAS take its workspace now, as a capture would take it from the graphs' pool."""
        if self._warm:
            return
        self._warm = True
        cell = torch.zeros(16, 16, device=self._device)
        bias, out = cell[0].clone(), torch.empty_like(cell)
        before = int(torch.cuda.memory_reserved(self._device))
        with self.use():
            torch.mm(cell, cell, out=out)
            torch.addmm(bias, cell, cell, out=out)  # Goes through cuBLASLt.
        self.workspace = int(torch.cuda.memory_reserved(self._device)) - before


@functools.cache
def stream_of(device: torch.device, number: int = 0) -> CaptureStream:
    """The stream of this number on a device; it is made once per process."""
    return CaptureStream(device)


class GraphBackend:
    """Captures regions into one shared memory pool.

    ``torch.cuda.graph`` waits for the device, collects garbage and empties the allocator's cache
    before a capture, which would take long. This back end only stops the garbage collector, as a
    graph that it frees during a capture would invalidate the capture. The capture mode is
    ``thread_local``, as other threads call CUDA meanwhile to copy outputs or K/V."""

    reads_device = False
    """Whether a region may read device values on the host (``tolist``, ``item``)."""
    pools_static = True
    """Whether :meth:`static` allocates from a pool of its own, of `reserved_static` bytes."""

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
    def overhead(self) -> int:
        """Bytes of cuBLAS's workspaces for our streams: 32 MiB each on Hopper."""
        streams = (self._capture_stream, self._second_stream)
        return sum(stream.workspace for stream in streams if stream is not None)

    def side_stream(self, room: int) -> CaptureStream | None:
        """A second stream beside the first; None if its workspace takes more than `room` bytes."""
        # cuBLAS takes as much for it as for the first stream.
        if self._capture_stream.workspace > room:
            return None
        self._second_stream = stream_of(self.device, 1)
        self._second_stream.warm()
        return self._second_stream

    def open(self, pool: Any) -> None:
        """Capture into this pool, a handle from torch, until `close`; None makes one."""
        self._capture_stream.warm()
        self._static = torch.cuda.MemPool()
        self._open_pool(pool)

    def _open_pool(self, pool: Any) -> None:
        self._pool = pool if pool is not None else torch.cuda.graph_pool_handle()
        # Without a graph that stays, the allocator would drop the pool with its last graph, and
        # later refuse the pool's handle.
        cell = torch.zeros(16, 16, device=self.device)
        self._anchors.append(self.capture(lambda: cell.add_(0)))

    def close(self) -> None:
        """Free the pool. The caller has reset all captured regions before."""
        for anchor in self._anchors:
            anchor.reset()
        self._anchors.clear()
        self._pool = self._held = self._static = None
        self.reserved_static = 0
        torch.cuda.empty_cache()

    def capture(self, region: Region) -> Captured:
        """Capture `region`, which the caller has run before with tensors of these shapes. Whatever
        it raises is raised; no stream is left in capture mode."""
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
        return Captured(graph, pytree.tree_map_only(torch.Tensor, borrowed, output))

    def host_block(self, num_bytes: int) -> torch.Tensor:
        """Host memory ``[num_bytes]`` of uint8 that the device can copy from and to. Raises
        `RuntimeError` if the host does not have it."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Run the body on the stream of captures. cuBLAS keeps a workspace of 32 MiB for each
        stream that it was used on. vLLM captures on another stream, so without this the passes at
        the start would cost a second workspace."""
        with self._capture_stream.use():
            yield

    @contextmanager
    def static(self) -> Iterator[None]:
        """Allocate the static buffers of graphs in the body. They must not lie in the pool, as
        replays write to memory there that seems free. They should not share segments with the rest
        of the process either, as a buffer that stays would keep such a segment."""
        # The allocator gives freed memory only to the stream that it was allocated on.
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
        """Bytes of device memory that torch's allocator holds, in use or not."""
        return int(torch.cuda.memory_reserved(self.device))

    def peak(self, region: Region) -> tuple[Any, int]:
        """The region's result, and the most bytes that it needed beyond those in use before."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = region()
        return result, torch.cuda.max_memory_allocated(self.device) - before

    def hold(self, num_bytes: int) -> bool:
        """Take so many bytes from the device until `release`; False if it lacks them."""
        # vLLM profiles the memory of graphs by how much is gone from the device.
        torch.cuda.empty_cache()
        try:
            self._held = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            return False
        return True

    def release(self) -> None:
        if self._held is not None:  # A pool cannot use the allocator's cache.
            self._held = None
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def timed(self, region: Region) -> tuple[Any, float]:
        """The region's result, and the seconds until the device, idle before, is done."""
        self.synchronize()
        start = time.perf_counter()
        result = region()
        self.synchronize()
        return result, time.perf_counter() - start


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


def make_backend(device: torch.device) -> GraphBackend:
    """The back end that captures on `device`, or a GraftError if that has no CUDA graphs."""
    if device.type == "cuda":
        return GraphBackend(device)
    raise GraftError(f"there are no CUDA graphs on the device {device}")

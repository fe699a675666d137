"""A ring of buffers on the device, and the stream that empties them (see ``staged``).

Three orders are kept, by events alone:

- a copy into a buffer waits for the kernel that last read it;
- the kernel waits for that copy. It has a stream of its own: on the copies' stream, the next copy
  would wait until a busy device has a multiprocessor for the kernel;
- who waits for a load waits for its kernels, so it asks :meth:`StagingRing.behind`; and what comes
  later on the copies' stream waits too, once an operation ends (:meth:`StagingRing.join`).
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_graft.hicache.copies.page_kernel import ALIGNMENT, RangeCopy
from vllm_graft.hicache.copies.staged_plan import Buffers, Chunk

BUFFERS = 3
"""One is filled, one is emptied, one is ready: nobody waits for another's launch."""


class StagingRing:
    """Memory that loads go through.

    Args:
        memory: uint8 ``[bytes]`` on the device.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        size = memory.numel() // BUFFERS // ALIGNMENT * ALIGNMENT
        self.buffers = Buffers(memory.data_ptr(), size, BUFFERS)
        # Before the step's own kernels: these wait for what it brings.
        self.stream = torch.cuda.Stream(priority=-1)
        self._filled = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._emptied = [torch.cuda.Event() for _ in range(BUFFERS)]

    @classmethod
    def allocate(cls, num_bytes: int) -> StagingRing:
        """On the current device.

        Raises:
            RuntimeError: if there is no such piece of memory; torch's is an OutOfMemoryError.
        """
        return cls(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))

    def through(self, chunk: Chunk, fill: RangeCopy, empty: RangeCopy) -> None:
        """Enqueue a chunk.

        Args:
            chunk: which.
            fill: enqueues 2D copies into its buffer, on the stream that is current.
            empty: enqueues runs from there, on the ring's stream.
        """
        copies = torch.cuda.current_stream()
        copies.wait_event(self._emptied[chunk.buffer])
        fill(*chunk.fill)
        self._filled[chunk.buffer].record(copies)
        self.stream.wait_event(self._filled[chunk.buffer])
        with torch.cuda.stream(self.stream):
            empty(*chunk.empty)
            self._emptied[chunk.buffer].record(self.stream)

    def behind(self, copies: Any) -> Any:
        """The stream on which an event is behind all work of this ring and of ``copies``."""
        self.stream.wait_stream(copies)
        return self.stream

    def join(self, copies: Any) -> None:
        """Order later work of ``copies`` behind all work of this ring."""
        copies.wait_stream(self.stream)

    def synchronize(self) -> None:
        """Block until the kernels are done; those whose copies are."""
        self.stream.synchronize()

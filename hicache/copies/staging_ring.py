"""A ring of buffers on the device, and the stream that empties them (see ``staged_plan``).

Events alone keep three orders:

- a copy into a buffer waits for the kernel that last read the buffer;
- the kernel waits for that copy. It runs on a stream of its own. On the copies' stream, the next
  copy would have to wait until a busy device has a free multiprocessor for the kernel;
- work that needs a load waits for the load's kernels, on the stream that :meth:`StagingRing.behind`
  returns. Later work of the copies' stream waits for them too, from the end of an operation on
  (:meth:`StagingRing.join`).
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_graft.hicache.copies.page_kernel import ALIGNMENT, RangeCopy
from vllm_graft.hicache.copies.staged_plan import Buffers, Chunk

BUFFERS = 3
"""While one buffer is filled and one is emptied, a third is ready, so no launch causes a wait."""


class StagingRing:
    """The buffers that staged loads go through.

    Args:
        memory: uint8 ``[bytes]`` on the device, which is divided into :data:`BUFFERS` buffers.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        size = memory.numel() // BUFFERS // ALIGNMENT * ALIGNMENT
        self.buffers = Buffers(memory.data_ptr(), size, BUFFERS)
        # High priority: the step's own kernels wait for what this stream brings.
        self.stream = torch.cuda.Stream(priority=-1)
        self._filled = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._emptied = [torch.cuda.Event() for _ in range(BUFFERS)]

    @classmethod
    def allocate(cls, num_bytes: int) -> StagingRing:
        """Allocate a ring of ``num_bytes`` bytes in all on the current device.

        Raises:
            RuntimeError: if there is not enough memory. Torch's is an OutOfMemoryError.
        """
        return cls(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))

    def through(self, chunk: Chunk, fill: RangeCopy, empty: RangeCopy) -> None:
        """Enqueue the copies of a chunk, through its buffer.

        Args:
            chunk: the chunk.
            fill: enqueues a range of 2D copies into buffers. It is called on the current stream.
            empty: enqueues a range of runs from buffers. It is called on the ring's stream.
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
        """A stream on which an event comes after all work of this ring and of ``copies``."""
        self.stream.wait_stream(copies)
        return self.stream

    def join(self, copies: Any) -> None:
        """Let later work of the stream ``copies`` wait for all work of this ring."""
        copies.wait_stream(self.stream)

    def synchronize(self) -> None:
        """Wait until the kernels have ended whose copies have ended."""
        self.stream.synchronize()

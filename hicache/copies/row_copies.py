"""The 2D copies of an operation: straight to blocks and slots, or through a ring of buffers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from vllm_graft.base.log import logger
from vllm_graft.hicache.copies.copy_engine import Pools
from vllm_graft.hicache.copies.cuda_driver import CudaDriver
from vllm_graft.hicache.copies.page_kernel import ALIGNMENT
from vllm_graft.hicache.copies.staged_plan import (
    Batches,
    Buffers,
    Chunk,
    StagedCopies,
    StagedPlanner,
)
from vllm_graft.hicache.copies.strided import HostShard, RangeCopy, StridedCopies, StridedPlanner
from vllm_graft.hicache.messages.operation import CacheOperation, Direction
from vllm_graft.hicache.pages.layout import Copies

BUFFERS = 3
"""While one buffer is filled and one is emptied, a third is ready, so no launch causes a wait."""


class StagingRing:
    """Buffers on the device that staged loads go through, and the stream that empties them.

    Events alone keep three orders:

    - a copy into a buffer waits for the kernel that last read the buffer;
    - the kernel waits for that copy. It runs on a stream of its own. On the copies' stream, the
      next copy would have to wait until a busy device has a free multiprocessor for the kernel;
    - work that needs a load waits for the load's kernels, on the stream that :meth:`behind`
      returns. Later work of the copies' stream waits for them too, from the end of an operation on
      (:meth:`join`).

    ``memory`` is uint8 ``[bytes]`` and is divided into :data:`BUFFERS` buffers."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        size = memory.numel() // BUFFERS // ALIGNMENT * ALIGNMENT
        self.buffers = Buffers(memory.data_ptr(), size, BUFFERS)
        # High priority: the step's own kernels wait for what this stream brings.
        self.stream = torch.cuda.Stream(priority=-1)
        self._filled = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._emptied = [torch.cuda.Event() for _ in range(BUFFERS)]

    @classmethod
    def allocate(cls, num_bytes: int) -> Self:
        """Allocate a ring of ``num_bytes`` bytes in all; RuntimeError if there are not so many."""
        return cls(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))

    def through(self, chunk: Chunk, fill: RangeCopy, empty: RangeCopy) -> None:
        """Enqueue the copies of a chunk, through its buffer. ``fill`` is called on the current
        stream, and ``empty`` on the ring's."""
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
        self.stream.synchronize()


@dataclass(frozen=True)
class PlannedCopy:
    """Copies of an operation that are made by the same method. ``ranges`` has the range ``(begin,
    end)`` of the copies of each layer, if layers are copied one by one."""

    copied: Copies | StridedCopies | StagedCopies
    copy: RangeCopy
    ranges: Mapping[str, tuple[int, int]]

    def enqueue(self, layers: Iterable[str]) -> None:
        """Enqueue the copies of the named layers, those of neighbours together."""
        joined: list[tuple[int, int]] = []
        for begin, end in (self.ranges[name] for name in layers if name in self.ranges):
            if joined and joined[-1][1] == begin:
                begin = joined.pop()[0]
            joined.append((begin, end))
        for begin, end in joined:
            self.copy(begin, end)


class RowCopies:
    """Plans and prepares 2D copies (`strided`), some of them through the `ring` (`staged`), from
    whose buffers ``run_copy`` copies to blocks. If one fails, no more of that kind are made. There
    is no ring either if the pages of no pool fit into its buffers."""

    def __init__(
        self,
        pools: Pools,
        shard: HostShard,
        driver: CudaDriver,
        ring: StagingRing | None,
        run_copy: Callable[[Copies], RangeCopy],
    ) -> None:
        self._driver, self._run_copy = driver, run_copy
        self._planner = StridedPlanner(pools, shard, driver.max_pitch)
        self.strided = True
        if ring is not None:
            columns = self._planner.columns
            self._stager = StagedPlanner(columns, shard, ALIGNMENT, ring.buffers)
            if not self._stager.serves:
                logger.info("host KV cache: no page is of a size for staging memory, there is none")
                ring = None
        self.ring = ring
        self.staged = ring is not None

    def prepare(
        self, operation: CacheOperation, batches: Batches, staged: bool
    ) -> tuple[list[PlannedCopy], CacheOperation | None]:
        """The 2D copies of an operation, and the rest of it, for which they do not pay, or None.
        Call it on the stream of the direction. ``batches`` are the layers that are copied together,
        if they are copied one after the other. With ``staged`` a load may go through the ring."""
        planned: list[PlannedCopy] = []
        rest: CacheOperation | None = operation
        plan = self._planner.plan(operation, bool(batches)) if self.strided else None
        if plan is not None:
            enqueue = self._driver.prepare(plan.copies, operation.direction)
            copy = self._watched(enqueue, self._no_rows)
            planned.append(PlannedCopy(plan.copies, copy, plan.ranges))
            rest = plan.rest
        load = operation.direction is Direction.LOAD
        ring = self.ring if load and staged and self.staged and self.strided else None
        if ring is not None and rest is not None:
            found = self._stager.plan(rest, batches)
            if found is not None:
                copy = self._through(ring, found.copies)
                planned.append(PlannedCopy(found.copies, copy, found.ranges))
                rest = found.rest
        return planned, rest

    def join(self, planned: list[PlannedCopy], stream: object) -> None:
        """Let later work of the loads' stream wait for all of the planned copies."""
        if self.ring is not None and _staged(planned):
            self.ring.join(stream)

    def behind(self, planned: list[PlannedCopy], stream: object) -> object:
        """The stream on which an event comes after everything that was enqueued of a load."""
        if self.ring is not None and _staged(planned):
            return self.ring.behind(stream)
        return stream

    def _through(self, ring: StagingRing, copies: StagedCopies) -> RangeCopy:
        fill = self._watched(self._driver.prepare(copies.fills, Direction.LOAD), self._no_rows)
        empty = self._watched(self._run_copy(copies.empties), self._no_ring)

        def copy(begin: int, end: int) -> None:
            for chunk in copies.chunks[begin:end]:
                ring.through(chunk, fill, empty)

        return copy

    def _watched(self, enqueue: RangeCopy, failed: Callable[[], None]) -> RangeCopy:
        def copy(begin: int, end: int) -> None:
            try:
                enqueue(begin, end)
            except Exception:
                # This operation has failed, and later ones may fail for the same reason.
                failed()
                raise

        return copy

    def _no_rows(self) -> None:
        logger.warning("host KV cache: no more 2D copies, the next go by other ways")
        self.strided = False

    def _no_ring(self) -> None:
        logger.warning("host KV cache: no more loads through the staging memory")
        self.staged = False


def _staged(planned: list[PlannedCopy]) -> bool:
    return any(isinstance(copy.copied, StagedCopies) for copy in planned)

"""The copy engine for CUDA. Each direction has its own stream, and the host never waits in a step.

Events alone keep the order:

- a store reads what the forward pass wrote, so its stream waits for the work that is on the compute
  stream when the store is submitted;
- vLLM may give a block that a store still reads to another request. Then the compute stream waits
  for the store before it goes on (:meth:`StreamCopyEngine.fence`);
- an asynchronous load writes blocks that no other work uses. It waits for the work of earlier
  steps, which may have zeroed the blocks, but not for the step in flight;
- a load that the step itself reads is copied layer by layer, and an event follows each layer. The
  compute stream waits for a layer's event before the layer's attention runs, or for all events
  before a FULL graph is replayed.

There are four methods of copying:

- 2D copies of the copy engines, if many blocks and their slots are consecutive (``strided``);
- 2D copies to staging memory on the device, if only the slots of a load are consecutive. From there
  a kernel on a third stream copies the pages to their blocks (``staged_plan``);
- a kernel, for the other loads within a step (``page_kernel``);
- copy engines with one copy per run of bytes, for everything else.

If the host keeps pages in another form, one kernel makes all copies (``fp8_kernel``,
``packed_kernel``)."""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from vllm_graft.base.log import logger
from vllm_graft.hicache.copies.copy_engine import Convert, CopyEngine, CopyResult, Pools, Unfit
from vllm_graft.hicache.copies.cuda_driver import CudaDriver
from vllm_graft.hicache.copies.page_kernel import fits, load_runs
from vllm_graft.hicache.copies.row_copies import PlannedCopy, RowCopies, StagingRing
from vllm_graft.hicache.copies.staged_plan import Batches, StagedCopies
from vllm_graft.hicache.copies.strided import HostShard, RangeCopy, StridedCopies
from vllm_graft.hicache.messages.operation import CacheOperation, Direction
from vllm_graft.hicache.pages.layout import Addresses, Copies

LAYERS_AT_ONCE = 4
"""Most layers that are copied together; see :func:`layer_batches`."""

BatchCopy = Callable[[Addresses, Addresses, Addresses, bool], None]
"""Enqueues copies as :func:`driver_copy` does."""


def driver_copy(sources: Addresses, targets: Addresses, sizes: Addresses, any_order: bool) -> None:
    """Enqueue all copies with one call of the driver (cuMemcpyBatchAsync), on the current stream;
    addresses and bytes are int64 ``[n]``. In `any_order` the driver may read the sources before
    earlier work of the stream ends: so for host memory, which no stream writes, not for K/V."""
    from vllm import _custom_ops as ops

    ops.swap_blocks_batch(
        torch.from_numpy(sources),
        torch.from_numpy(targets),
        torch.from_numpy(sizes),
        is_src_access_order_any=any_order,
    )


@dataclass
class InFlight:
    """A submitted operation, between two timed events."""

    operation: CacheOperation
    start: Any
    end: Any
    copied: list[PlannedCopy]
    """The copies, which hold the driver's descriptors until the operation has ended."""

    def result(self) -> CopyResult:
        """The result of the operation. Call it only after the operation has ended."""
        return CopyResult(
            self.operation,
            num_bytes=sum(copy.copied.num_bytes for copy in self.copied),
            strided_bytes=self._bytes_by(StridedCopies),
            staged_bytes=self._bytes_by(StagedCopies),
            seconds=self.start.elapsed_time(self.end) * 1e-3,
        )

    def _bytes_by(self, kind: type) -> int:
        return sum(copy.copied.num_bytes for copy in self.copied if isinstance(copy.copied, kind))


Enqueued = tuple[Any, list[PlannedCopy]]
"""The event before the first copy, and the planned copies."""

PrepareRest = Callable[[CacheOperation], PlannedCopy]
"""Prepares the copies of an operation for which 2D copies do not pay."""


def layer_batches(count: int) -> list[range]:
    """Divide ``count`` layers into batches that are copied together. The batches at both ends are
    small, because the computation waits for the first and for the last layers. In between fewer
    launches are faster, because each has to wait for a free place beside the step's own kernels."""
    batches, done = [], 0
    while done < count:
        size = max(1, min(LAYERS_AT_ONCE, done, (count - done) // 2))
        batches.append(range(done, done + size))
        done += size
    return batches


class StreamCopyEngine(CopyEngine):
    """Copies on streams of a CUDA device; the shard is pinned memory. `run_copy` prepares the
    copies of a load within a step, which are then enqueued in ranges. `ring` has buffers for loads
    to blocks in any order, and needs ``strided``."""

    def __init__(
        self, pools: Pools, shard: HostShard, batch_copy: BatchCopy = driver_copy,
        run_copy: Callable[[Copies], RangeCopy] = load_runs, convert: Convert | None = None,
        unfit: Unfit | None = None,
        strided: CudaDriver | None = None, ring: StagingRing | None = None,
    ) -> None:  # fmt: skip
        super().__init__(pools, shard, convert, unfit)
        self._rows = None
        if strided is not None and convert is None:
            self._rows = RowCopies(pools, shard, strided, ring, run_copy)
        self._batch_copy, self._run_copy = batch_copy, run_copy
        # Loads have high priority: the step's own kernels wait for what a load's kernel brings.
        self._streams = {
            Direction.LOAD: torch.cuda.Stream(priority=-1),
            Direction.STORE: torch.cuda.Stream(priority=0),
        }
        self._in_flight: dict[Direction, deque[InFlight]] = {kind: deque() for kind in Direction}
        self._layer_events: dict[str, Any] = {}
        self._failed: list[CopyResult] = []
        self._step = 0
        self._steps: deque[tuple[int, Any, Any]] = deque()
        self._step_start = _timed_event()
        self._step_start.record(torch.cuda.current_stream())

    @property
    def strided(self) -> bool:
        """Whether 2D copies are made: there is a driver, and it has refused no copy."""
        return self._rows is not None and self._rows.strided

    @property
    def staged(self) -> bool:
        """Whether loads go through the ring: pages fit into it, and no copy has failed."""
        return self.strided and self._rows is not None and self._rows.staged

    def begin_step(self, number: int = 0) -> None:
        # A new event: that of a step in flight is still needed to compute its time.
        self._step, self._step_start = number, _timed_event()
        self._step_start.record(torch.cuda.current_stream())

    def end_step(self) -> None:
        if self._step:
            end = _timed_event()
            end.record(torch.cuda.current_stream())
            self._steps.append((self._step, self._step_start, end))
            self._step = 0

    def step_seconds(self) -> dict[int, float]:
        seconds = {}
        while self._steps and self._steps[0][2].query():
            number, start, end = self._steps.popleft()
            seconds[number] = start.elapsed_time(end) * 1e-3
        return seconds

    def store(self, operation: CacheOperation) -> None:
        self._streams[Direction.STORE].wait_stream(torch.cuda.current_stream())
        self._submit(operation, lambda: self._enqueue(operation, self._by_copy_engine))

    def load(self, operation: CacheOperation) -> None:
        self._streams[Direction.LOAD].wait_event(self._step_start)
        self._submit(operation, lambda: self._enqueue(operation, self._by_copy_engine))

    def load_now(self, operation: CacheOperation) -> None:
        self._streams[Direction.LOAD].wait_stream(torch.cuda.current_stream())
        if self._submit(operation, lambda: self._enqueue(operation, self._by_kernel)):
            self._wait_last_load()
        else:
            self._failed.pop()
            self._try_again(operation)

    def load_layers(self, operation: CacheOperation, first: Collection[str]) -> None:
        self._streams[Direction.LOAD].wait_stream(torch.cuda.current_stream())
        if not self._submit(operation, lambda: self._enqueue_layers(operation, first)):
            self._failed.pop()
            # The layers that were submitted have been copied, so nothing has to wait for them.
            for name in self._layers(operation, ()):
                self._layer_events.pop(name, None)
            self._try_again(operation)

    def wait_layer(self, layer: str) -> None:
        event = self._layer_events.pop(layer, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def wait_all_layers(self) -> int:
        layers = list(self._layer_events)
        for layer in layers:
            self.wait_layer(layer)
        return len(layers)

    def fence(self, jobs: Collection[int]) -> None:
        wanted = set(jobs)
        compute = torch.cuda.current_stream()
        for entry in reversed(self._in_flight[Direction.STORE]):
            if not wanted.isdisjoint(entry.operation.ids):
                # A stream runs in order, so the last of the stores ends after all others.
                compute.wait_event(entry.end)
                # An asynchronous load does not wait for this step's work on the compute stream,
                # but it may write a block that the store reads.
                self._streams[Direction.LOAD].wait_event(entry.end)
                return

    def finished(self) -> list[CopyResult]:
        results, self._failed = self._failed, []
        for queue in self._in_flight.values():
            while queue and queue[0].end.query():
                results.append(result := queue[0].result())
                for copy in queue.popleft().copied:
                    if isinstance(copy.copied, Copies):
                        result.unfit += self._unfit_slots(result.operation, copy.copied)
        return results

    def drain(self) -> None:
        for direction in Direction:
            self._synchronize(direction)

    def _synchronize(self, direction: Direction) -> None:
        self._streams[direction].synchronize()
        if direction is Direction.LOAD and self._rows is not None and self._rows.ring is not None:
            # The copies that the ring's kernels wait for have ended by now.
            self._rows.ring.synchronize()

    def _try_again(self, operation: CacheOperation) -> None:
        self.second_tries += 1
        if self._submit(
            operation, lambda: self._enqueue(operation, self._by_copy_engine, again=True)
        ):
            self._wait_last_load()
        else:
            self._incomplete.append(operation)

    def _wait_last_load(self) -> None:
        torch.cuda.current_stream().wait_event(self._in_flight[Direction.LOAD][-1].end)

    def _submit(self, operation: CacheOperation, enqueue: Callable[[], Enqueued]) -> bool:
        stream = self._streams[operation.direction]
        try:
            with torch.cuda.stream(stream):
                start, copied = enqueue()
                if self._rows is not None:
                    self._rows.join(copied, stream)
                end = _timed_event()
                end.record(stream)
        except Exception:
            logger.exception("host KV cache: a copy could not be submitted")
            # Some copies may be in flight, and other work is about to use their blocks.
            self._synchronize(operation.direction)
            self._failed.append(CopyResult(operation, failed=True))
            return False
        self._in_flight[operation.direction].append(InFlight(operation, start, end, copied))
        return True

    def _begin(self, direction: Direction) -> Any:
        start = _timed_event()
        start.record(self._streams[direction])
        return start

    def _enqueue(
        self, operation: CacheOperation, prepare_rest: PrepareRest, again: bool = False
    ) -> Enqueued:
        """Enqueue a whole operation, ``again`` without the ring, whose kernel may have failed."""
        planned = self._prepare(operation, prepare_rest, staged=not again)
        start = self._begin(operation.direction)
        for copy in planned:
            copy.copy(0, len(copy.copied))
        return start, planned

    def _enqueue_layers(self, operation: CacheOperation, first: Collection[str]) -> Enqueued:
        names = self._layers(operation, first)
        batches = [[names[place] for place in batch] for batch in layer_batches(len(names))]
        planned = self._prepare(operation, self._by_kernel, batches)
        start = self._begin(operation.direction)
        for batch in batches:
            for copy in planned:
                copy.enqueue(batch)
            event = torch.cuda.Event()
            stream = self._streams[Direction.LOAD]
            event.record(stream if self._rows is None else self._rows.behind(planned, stream))
            # A stream runs in order, so the event comes after earlier loads of these layers too.
            self._layer_events |= dict.fromkeys(batch, event)
        return start, planned

    def _prepare(
        self,
        operation: CacheOperation,
        prepare_rest: PrepareRest,
        batches: Batches = (),
        staged: bool = True,
    ) -> list[PlannedCopy]:
        """Prepare the copies of an operation, on its direction's stream. It comes before the first
        event, so the time of the copies does not include it."""
        if self._rows is None:
            return [prepare_rest(operation)]
        planned, rest = self._rows.prepare(operation, batches, staged)
        return planned if rest is None else [*planned, prepare_rest(rest)]

    def _by_kernel(self, load: CacheOperation) -> PlannedCopy:
        runs, ranges = self._layer_copies(load)
        if self._convert is None and fits(runs):
            return PlannedCopy(runs, self._run_copy(runs), ranges)
        return PlannedCopy(runs, self._runs(runs, Direction.LOAD), ranges)

    def _by_copy_engine(self, operation: CacheOperation) -> PlannedCopy:
        runs = self._copies(operation)
        return PlannedCopy(runs, self._runs(runs, operation.direction), {})

    def _runs(self, runs: Copies, direction: Direction) -> RangeCopy:
        if self._convert is not None:
            return self._convert(runs, direction)
        load = direction is Direction.LOAD
        source, target = (runs.host, runs.device) if load else (runs.device, runs.host)
        return lambda begin, end: self._batch_copy(
            source[begin:end], target[begin:end], runs.sizes[begin:end], load
        )


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)

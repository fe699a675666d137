"""Copies on CUDA streams of their own, one for each direction; the host never waits in a step.

Order is kept by events alone:

- a store reads what the forward pass wrote: its stream waits for the compute stream as it stands
  when the store is submitted;
- a block that a store still reads may be handed to another request: the compute stream waits for
  the store before it goes on (:meth:`StreamCopyEngine.fence`);
- an asynchronous load writes blocks that nobody else uses: it waits for the work of earlier steps,
  which may have zeroed them, but not for the step in flight;
- a load that the step itself reads is copied a layer at a time, with an event behind each; the
  compute stream waits for a layer's event before its attention runs, or for all of them before a
  FULL graph is replayed.

Many consecutive blocks in consecutive slots go by 2D copies of the copy engines (``strided``).
Loads of which only the slots are consecutive do so by way of memory on the device: from there a
kernel on a third stream takes them to their blocks (``staged``, ``staging``). The rest goes by copy
engines too, a run of bytes each, but for loads within a step (``page_kernel``). Pages that the host
keeps in another type have a kernel of their own (``fp8_kernel``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import torch

from vllm_graft.base.log import logger
from vllm_graft.hicache.copies.copy_engine import Convert, CopyEngine, CopyResult, HostShard, Pools
from vllm_graft.hicache.copies.page_kernel import RangeCopy, fits, load_runs
from vllm_graft.hicache.copies.planned_copy import InFlight, PlannedCopy
from vllm_graft.hicache.copies.row_copies import RowCopies
from vllm_graft.hicache.copies.staging_ring import StagingRing
from vllm_graft.hicache.copies.strided import StridedDriver
from vllm_graft.hicache.faults.injector import FaultInjector
from vllm_graft.hicache.messages.operation import CacheOperation, Direction
from vllm_graft.hicache.pages.layout import Addresses, Copies

LAYERS_AT_ONCE = 4
"""Most layers that are copied by one launch, see :func:`layer_batches`."""

BatchCopy = Callable[[Addresses, Addresses, Addresses, bool], None]
"""``(sources, targets, sizes, any_order)``: int64 ``[n]`` each; enqueues on the current stream."""


def driver_copy(sources: Addresses, targets: Addresses, sizes: Addresses, any_order: bool) -> None:
    """All copies in one call of the driver (cuMemcpyBatchAsync), on the current stream.

    ``any_order`` lets it read the sources ahead of the stream's order: right for host memory, which
    no stream writes meanwhile, and wrong for the KV cache.
    """
    from vllm import _custom_ops as ops

    ops.swap_blocks_batch(
        torch.from_numpy(sources),
        torch.from_numpy(targets),
        torch.from_numpy(sizes),
        is_src_access_order_any=any_order,
    )


Enqueued = tuple[Any, list[PlannedCopy]]
"""The event before the first copy, and what is copied."""

Enqueue = Callable[[CacheOperation], Enqueued]


def layer_batches(count: int) -> list[range]:
    """How many layers to copy at once: few at both ends, where the computation waits for them.

    In between each launch waits for a place beside the step's own kernels, so that fewer are
    faster: the copies are what the step takes time for, and catch up with by the last layer.
    """
    batches, done = [], 0
    while done < count:
        size = max(1, min(LAYERS_AT_ONCE, done, (count - done) // 2))
        batches.append(range(done, done + size))
        done += size
    return batches


class StreamCopyEngine(CopyEngine):
    """Copies with the copy engines of a CUDA device.

    Args:
        pools: where the pages of each group are on the device.
        shard: where they are on the host; pinned.
        batch_copy: enqueues a batch; tests put another in place.
        run_copy: the same for what a step reads itself, prepared once and enqueued in ranges.
        injector: makes copies fail, but not the second try of a load within a step.
        delay_cycles: GPU clock cycles that each load is held up by, to find races. 0 for none.
        convert: prepares all copies, in place of the others, where the host keeps another type.
        strided: makes 2D copies; None for none.
        ring: what loads may go through whose blocks are in any order; None for nothing. Of no use
            without ``strided``.
    """

    def __init__(
        self,
        pools: Pools,
        shard: HostShard,
        batch_copy: BatchCopy = driver_copy,
        run_copy: Callable[[Copies], RangeCopy] = load_runs,
        injector: FaultInjector | None = None,
        delay_cycles: int = 0,
        convert: Convert | None = None,
        strided: StridedDriver | None = None,
        ring: StagingRing | None = None,
    ) -> None:
        super().__init__(pools, shard, injector, convert)
        self._rows = None
        if strided is not None and convert is None:
            self._rows = RowCopies(pools, shard, strided, ring, run_copy)
        self._batch_copy = batch_copy
        self._run_copy = run_copy
        self._delay_cycles = delay_cycles
        # Before the step's own kernels: these wait for what a load's kernel brings.
        priority = {Direction.LOAD: -1, Direction.STORE: 0}
        self._streams = {way: torch.cuda.Stream(priority=priority[way]) for way in Direction}
        self._in_flight: dict[Direction, deque[InFlight]] = {
            direction: deque() for direction in Direction
        }
        self._layer_events: dict[str, Any] = {}
        self._failed: list[CopyResult] = []
        self._step = 0
        self._steps: deque[tuple[int, Any, Any]] = deque()
        self._step_start = self._timed_event()
        self._step_start.record(torch.cuda.current_stream())

    @property
    def strided(self) -> bool:
        """Whether 2D copies are made: there is a driver, and it has refused none."""
        return self._rows is not None and self._rows.strided

    @property
    def staged(self) -> bool:
        """Whether loads go through the ring: there is one that serves, and all went well."""
        return self.strided and self._rows is not None and self._rows.staged

    def begin_step(self, number: int = 0) -> None:
        """Mark the compute stream: asynchronous loads of this step start behind the mark."""
        # The mark of a step that has not ended is needed for its time.
        self._step, self._step_start = number, self._timed_event()
        self._step_start.record(torch.cuda.current_stream())

    def end_step(self) -> None:
        """Mark the compute stream again."""
        if self._step:
            end = self._timed_event()
            end.record(torch.cuda.current_stream())
            self._steps.append((self._step, self._step_start, end))
            self._step = 0

    def step_seconds(self) -> dict[int, float]:
        """Between the marks of steps that the device has finished since the last call."""
        seconds = {}
        while self._steps and self._steps[0][2].query():
            number, start, end = self._steps.popleft()
            seconds[number] = start.elapsed_time(end) * 1e-3
        return seconds

    def store(self, operation: CacheOperation) -> None:
        """Enqueue behind the compute stream's work."""
        self._streams[Direction.STORE].wait_stream(torch.cuda.current_stream())
        self._submit(operation, self._enqueue_all)

    def load(self, operation: CacheOperation) -> None:
        """Enqueue behind the step's start, beside its forward pass."""
        self._streams[Direction.LOAD].wait_event(self._step_start)
        self._submit(operation, self._enqueue_all)

    def load_now(self, operation: CacheOperation) -> None:
        """Enqueue whole behind the compute stream's work, which then waits for it."""
        self._streams[Direction.LOAD].wait_stream(torch.cuda.current_stream())
        if not self._submit(operation, self._enqueue_runs):
            self._failed.pop()
            self._try_again(operation)
        else:
            self._wait_last_load()

    def load_layers(self, operation: CacheOperation, first: Collection[str]) -> None:
        """Enqueue all layers behind the compute stream's work, an event behind each batch."""
        self._streams[Direction.LOAD].wait_stream(torch.cuda.current_stream())
        if not self._submit(operation, lambda load: self._enqueue_layers(load, first)):
            self._failed.pop()
            # What was submitted is there: nobody has to wait for it.
            for name in self._layers(operation, ()):
                self._layer_events.pop(name, None)
            self._try_again(operation)

    def wait_layer(self, layer: str) -> None:
        """Order later work of the compute stream behind the load of one layer."""
        event = self._layer_events.pop(layer, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def wait_all_layers(self) -> int:
        """The same for every layer that has not been waited for; returns how many."""
        layers = list(self._layer_events)
        for layer in layers:
            self.wait_layer(layer)
        return len(layers)

    def fence(self, jobs: Collection[int]) -> None:
        """Order later work of the compute stream, and later loads, behind stores in flight."""
        wanted = set(jobs)
        compute = torch.cuda.current_stream()
        for entry in reversed(self._in_flight[Direction.STORE]):
            if not wanted.isdisjoint(entry.operation.ids):
                # A stream runs in order: the last of them is behind the others.
                compute.wait_event(entry.end)
                # An asynchronous load does not wait for the compute stream of this step, but may
                # write a block that the store reads.
                self._streams[Direction.LOAD].wait_event(entry.end)
                return

    def finished(self) -> list[CopyResult]:
        """Operations that have ended since the last call; asks the events, waits for none."""
        results, self._failed = self._failed, []
        for queue in self._in_flight.values():
            while queue and queue[0].end.query():
                results.append(queue.popleft().result())
        return results

    def drain(self) -> None:
        """Block until nothing is in flight."""
        for direction in Direction:
            self._synchronize(direction)

    def _synchronize(self, direction: Direction) -> None:
        self._streams[direction].synchronize()
        if direction is Direction.LOAD and self._rows is not None and self._rows.ring is not None:
            # What it waits for is done now.
            self._rows.ring.synchronize()

    def _try_again(self, operation: CacheOperation) -> None:
        self.second_tries += 1
        if self._submit(operation, self._enqueue_again):
            self._wait_last_load()
        else:
            self._incomplete.append(operation)

    def _wait_last_load(self) -> None:
        torch.cuda.current_stream().wait_event(self._in_flight[Direction.LOAD][-1].end)

    def _submit(self, operation: CacheOperation, enqueue: Enqueue) -> bool:
        """Run ``enqueue`` on the direction's stream; False if it failed."""
        stream = self._streams[operation.direction]
        try:
            with torch.cuda.stream(stream):
                start, copied = enqueue(operation)
                if self._rows is not None:
                    self._rows.join(copied, stream)
                end = self._timed_event()
                end.record(stream)
        except Exception:
            logger.exception("host KV cache: a copy could not be submitted")
            # Part of it may be under way, and the blocks are about to be used by others.
            self._synchronize(operation.direction)
            self._failed.append(CopyResult(operation, failed=True))
            return False
        entry = InFlight(operation, start, end, copied)
        self._in_flight[operation.direction].append(entry)
        return True

    def _begin(self, direction: Direction) -> Any:
        """On the direction's stream: the event before the first copy."""
        start = self._timed_event()
        start.record(self._streams[direction])
        if direction is Direction.LOAD and self._delay_cycles:
            torch.cuda._sleep(self._delay_cycles)
        return start

    def _enqueue_all(self, operation: CacheOperation) -> Enqueued:
        self._inject()
        return self._enqueue_whole(operation)

    def _enqueue_whole(self, operation: CacheOperation) -> Enqueued:
        return self._enqueue(self._parts(operation, self._by_copy_engine), operation.direction)

    def _enqueue_again(self, load: CacheOperation) -> Enqueued:
        """Past the ring, whose kernel may be what has failed."""
        parts = self._parts(load, self._by_copy_engine, staged=False)
        return self._enqueue(parts, load.direction)

    def _enqueue_runs(self, operation: CacheOperation) -> Enqueued:
        self._inject()
        return self._enqueue(self._parts(operation, self._by_kernel), operation.direction)

    def _enqueue(self, parts: list[PlannedCopy], direction: Direction) -> Enqueued:
        start = self._begin(direction)
        for part in parts:
            part.copy(0, len(part.copied))
        return start, parts

    def _enqueue_layers(self, operation: CacheOperation, first: Collection[str]) -> Enqueued:
        self._inject()
        parts = self._parts(operation, self._by_kernel, by_layer=True)
        start = self._begin(operation.direction)
        names = self._layers(operation, first)
        for batch in layer_batches(len(names)):
            for part in parts:
                part.enqueue(names[place] for place in batch)
            event = torch.cuda.Event()
            stream = self._streams[Direction.LOAD]
            event.record(stream if self._rows is None else self._rows.behind(parts, stream))
            # Streams run in order: an earlier load of this layer is there as well then.
            self._layer_events |= {names[place]: event for place in batch}
        return start, parts

    def _parts(
        self,
        operation: CacheOperation,
        present: Callable[[CacheOperation], PlannedCopy],
        by_layer: bool = False,
        staged: bool = True,
    ) -> list[PlannedCopy]:
        """Prepare an operation, on its direction's stream: that is no part of the copies' time.

        Args:
            operation: what to copy.
            present: prepares what 2D copies are no good for.
            by_layer: whether the ranges of layers are wanted.
            staged: whether a load may go through the ring.
        """
        if self._rows is None:
            return [present(operation)]
        parts, rest = self._rows.parts(operation, by_layer, staged)
        return parts if rest is None else [*parts, present(rest)]

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

    def _timed_event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)

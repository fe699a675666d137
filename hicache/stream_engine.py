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

Copy engines do all of it but for loads within a step, see ``page_kernel``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_graft.hicache.copy_engine import (
    CopyEngine,
    CopyResult,
    HostShard,
    Pools,
)
from vllm_graft.hicache.faults import FaultInjector
from vllm_graft.hicache.layout import Addresses, Copies
from vllm_graft.hicache.operation import CacheOperation, Direction
from vllm_graft.hicache.page_kernel import RangeCopy, fits, load_runs
from vllm_graft.log import logger

LAYERS_AHEAD = 4
"""Layers whose copies are enqueued before attention asks for them."""

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


@dataclass
class _InFlight:
    operation: CacheOperation
    start: Any
    end: Any
    num_bytes: int
    keep: Copies
    """Descriptors, until the driver is done with them."""
    timed: bool = True


@dataclass
class _Layered:
    """A load of which some layers are not enqueued yet."""

    operation: CacheOperation
    layers: deque[str]
    runs: Copies | None = None
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    copy: RangeCopy | None = None
    start: Any = None
    last: Any = None
    """Event behind the layer that was enqueued last."""
    idle: bool = False
    """Whether the stream had run dry before a layer was enqueued: no measure of the link then."""


class StreamCopyEngine(CopyEngine):
    """Copies with the copy engines of a CUDA device.

    Args:
        pools: where the pages of each group are on the device.
        shard: where they are on the host; pinned.
        batch_copy: enqueues a batch; tests put another in place.
        run_copy: the same for what a step reads itself, prepared once and enqueued in ranges.
        injector: makes copies fail, but not the second try of a load within a step.
        delay_cycles: GPU clock cycles that each load is held up by, to find races. 0 for none.
    """

    def __init__(
        self,
        pools: Pools,
        shard: HostShard,
        batch_copy: BatchCopy = driver_copy,
        run_copy: Callable[[Copies], RangeCopy] = load_runs,
        injector: FaultInjector | None = None,
        delay_cycles: int = 0,
    ) -> None:
        super().__init__(pools, shard, injector)
        self._batch_copy = batch_copy
        self._run_copy = run_copy
        self._delay_cycles = delay_cycles
        # Before the step's own kernels: these wait for what a load's kernel brings.
        priority = {Direction.LOAD: -1, Direction.STORE: 0}
        self._streams = {way: torch.cuda.Stream(priority=priority[way]) for way in Direction}
        self._in_flight: dict[Direction, deque[_InFlight]] = {
            direction: deque() for direction in Direction
        }
        self._layer_events: dict[str, list[Any]] = {}
        self._layered: list[_Layered] = []
        self._failed: list[CopyResult] = []
        self._spare: list[Any] = []
        self._step = 0
        self._steps: deque[tuple[int, Any, Any]] = deque()
        self._step_start = self._timed_event()
        self._step_start.record(torch.cuda.current_stream())

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
        self._submit(operation, lambda: self._enqueue_all(operation))

    def load(self, operation: CacheOperation) -> None:
        """Enqueue behind the step's start, beside its forward pass."""
        self._streams[Direction.LOAD].wait_event(self._step_start)
        self._submit(operation, lambda: self._enqueue_all(operation))

    def load_now(self, operation: CacheOperation) -> None:
        """Enqueue whole behind the compute stream's work, which then waits for it."""
        self._streams[Direction.LOAD].wait_stream(torch.cuda.current_stream())
        if not self._submit(operation, lambda: self._enqueue_runs(operation)):
            self._failed.pop()
            self._try_again(operation)
        else:
            self._wait_last_load()

    def load_layers(self, operation: CacheOperation, first: Collection[str]) -> None:
        """Enqueue the first layers behind the compute stream's work, with an event behind each.

        The others are enqueued from :meth:`wait_layer`, always some layers ahead: all of them would
        hold up the launch of the forward pass for longer than the first copies take.
        """
        self._streams[Direction.LOAD].wait_stream(torch.cuda.current_stream())
        load = _Layered(operation, deque(self._layers(operation, first)))
        self._layered.append(load)
        self._advance(load, len(first) + LAYERS_AHEAD)

    def wait_layer(self, layer: str) -> None:
        """Order later work of the compute stream behind the load of one layer."""
        for load in list(self._layered):
            # One more than before; all up to this layer where it is not the next one.
            later = load.layers.index(layer) + 1 + LAYERS_AHEAD if layer in load.layers else 1
            self._advance(load, later)
        events = self._layer_events.pop(layer, None)
        if events is None:
            return
        compute = torch.cuda.current_stream()
        for event in events:
            compute.wait_event(event)
        self._spare += events

    def wait_all_layers(self) -> int:
        """The same for every layer that has not been waited for; returns how many."""
        for load in list(self._layered):
            self._advance(load, len(load.layers))
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
                entry = queue.popleft()
                seconds = entry.start.elapsed_time(entry.end) * 1e-3 if entry.timed else 0.0
                results.append(CopyResult(entry.operation, entry.num_bytes, seconds))
        return results

    def drain(self) -> None:
        """Block until nothing is in flight."""
        for stream in self._streams.values():
            stream.synchronize()

    def _advance(self, load: _Layered, count: int) -> None:
        """Enqueue the next ``count`` layers of a load."""
        stream = self._streams[Direction.LOAD]
        try:
            with torch.cuda.stream(stream):
                if load.runs is None or load.copy is None:
                    self._inject()
                    load.runs, load.ranges = self._layer_copies(load.operation)
                    load.copy = self._prepared(load.runs)
                    load.start = self._begin(Direction.LOAD)
                for _ in range(min(count, len(load.layers))):
                    name = load.layers.popleft()
                    load.idle |= load.last is not None and load.last.query()
                    load.copy(*load.ranges[name])
                    event = self._event()
                    event.record(stream)
                    load.last = event
                    self._layer_events.setdefault(name, []).append(event)
                if not load.layers:
                    self._end(load.operation, load.start, load.runs, not load.idle)
                    self._layered.remove(load)
        except Exception:
            logger.exception("host KV cache: a layer's copy could not be submitted")
            self._layered.remove(load)
            # What was submitted is there then: its events need not be waited for.
            stream.synchronize()
            self._layer_events.clear()
            self._try_again(load.operation)

    def _try_again(self, operation: CacheOperation) -> None:
        self.second_tries += 1
        if self._submit(operation, lambda: self._enqueue(operation)):
            self._wait_last_load()
        else:
            self._incomplete.append(operation)

    def _wait_last_load(self) -> None:
        torch.cuda.current_stream().wait_event(self._in_flight[Direction.LOAD][-1].end)

    def _begin(self, direction: Direction) -> Any:
        """On the direction's stream: the event at the beginning of an operation."""
        start = self._timed_event()
        start.record(self._streams[direction])
        if direction is Direction.LOAD and self._delay_cycles:
            torch.cuda._sleep(self._delay_cycles)
        return start

    def _end(
        self, operation: CacheOperation, start: Any, copied: Copies, timed: bool = True
    ) -> None:
        """On the direction's stream: all of an operation is enqueued."""
        end = self._timed_event()
        end.record(self._streams[operation.direction])
        entry = _InFlight(operation, start, end, copied.num_bytes, copied, timed)
        self._in_flight[operation.direction].append(entry)

    def _submit(self, operation: CacheOperation, enqueue: Callable[[], Copies]) -> bool:
        """Run ``enqueue`` on the direction's stream between two events; False if it failed."""
        stream = self._streams[operation.direction]
        try:
            with torch.cuda.stream(stream):
                start = self._begin(operation.direction)
                self._end(operation, start, enqueue())
        except Exception:
            logger.exception("host KV cache: a copy could not be submitted")
            # Part of it may be under way, and the blocks are about to be used by others.
            stream.synchronize()
            self._failed.append(CopyResult(operation, failed=True))
            return False
        return True

    def _enqueue_all(self, operation: CacheOperation) -> Copies:
        self._inject()
        return self._enqueue(operation)

    def _enqueue_runs(self, operation: CacheOperation) -> Copies:
        self._inject()
        runs, _ = self._layer_copies(operation)
        self._prepared(runs)(0, len(runs))
        return runs

    def _prepared(self, runs: Copies) -> RangeCopy:
        """On the direction's stream: what enqueues ranges of a load's runs."""
        if fits(runs):
            return self._run_copy(runs)
        return lambda begin, end: self._batch_copy(
            runs.host[begin:end], runs.device[begin:end], runs.sizes[begin:end], True
        )

    def _enqueue(self, operation: CacheOperation) -> Copies:
        batch = self._copies(operation)
        if operation.direction is Direction.STORE:
            self._batch_copy(batch.device, batch.host, batch.sizes, False)
        else:
            self._batch_copy(batch.host, batch.device, batch.sizes, True)
        return batch

    def _event(self) -> Any:
        return self._spare.pop() if self._spare else torch.cuda.Event()

    def _timed_event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)

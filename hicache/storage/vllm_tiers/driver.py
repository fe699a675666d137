"""Runs one of vLLM's secondary tiers on a thread of its own.

vLLM calls a tier from the scheduler's thread, step by step: look-ups may have to be asked again,
jobs are submitted and polled for. Here a thread takes those steps while there is work, and callers
on other threads wait for their operation.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob

from vllm_graft.base.log import logger

POLL_SECONDS = 0.001
"""Between two steps while jobs run: a tier can't say that it has finished something."""

_NOTHING = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


@dataclass(eq=False)
class Operation:
    """A chunk to store or to load.

    Attributes:
        key: which chunk.
        slot: of the staging memory; nobody else's until the operation is done.
        load: whether it is loaded.
        context: as of a request of its own.
        done: whether the tier will not touch the slot any more.
        found: for a load, whether the tier had the chunk.
        success: whether the transfer worked.
        abandoned: whether the caller has given up; then the driver frees the slot.
    """

    key: OffloadKey
    slot: int
    load: bool
    context: ReqContext
    done: bool = False
    found: bool = True
    success: bool = False
    abandoned: bool = False


class TierDriver:
    """A tier, its thread, and the operations under way.

    Args:
        tier: open; shut down by :meth:`close`.
        free: called with the slot of an operation whose caller has given up, when it is done.
    """

    def __init__(self, tier: SecondaryTierManager, free: Callable[[int], None]) -> None:
        self._tier = tier
        self._free = free
        self._changed = threading.Condition()
        self._requested: list[Operation] = []
        self._looking: list[Operation] = []
        self._jobs: dict[int, Operation] = {}
        self._numbers = itertools.count(1)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="graft-tier", daemon=True)
        self._thread.start()

    def run(self, key: OffloadKey, slot: int, load: bool, timeout: float) -> Operation:
        """Store or load a chunk; blocks until it is done, or is abandoned after ``timeout``."""
        context = ReqContext(req_id=f"vllm-graft-{next(self._numbers)}")
        operation = Operation(key, slot, load, context)
        with self._changed:
            if self._closed:
                operation.done = True
                return operation
            self._requested.append(operation)
            self._changed.notify_all()
            self._changed.wait_for(lambda: operation.done, timeout)
            operation.abandoned = not operation.done
        return operation

    def close(self, timeout: float) -> None:
        """Finish what runs, for at most ``timeout`` seconds, and shut the tier down."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)
        try:
            self._tier.shutdown()
        except Exception:
            logger.exception("The tier could not be shut down.")

    def _run(self) -> None:
        try:
            while self._wait():
                self._step()
        except Exception:
            logger.exception("The tier failed; it is not used any more.")
            with self._changed:
                self._closed = True
            for operation in [*self._requested, *self._looking, *self._jobs.values()]:
                self._complete(operation, False)

    def _wait(self) -> bool:
        """Wait for work; False when closed and there is none."""
        with self._changed:
            busy = bool(self._looking or self._jobs)
            self._changed.wait_for(
                lambda: self._requested or self._closed, POLL_SECONDS if busy else None
            )
            return bool(self._requested or busy)

    def _step(self) -> None:
        with self._changed:
            requested, self._requested = self._requested, []
        for operation in requested:
            self._tier.on_new_request(operation.context)
            if operation.load:
                self._looking.append(operation)
            else:
                self._submit(operation)
        looking, self._looking = self._looking, []
        for operation in looking:
            self._look(operation)
        self._tier.on_schedule_end(_NOTHING)
        for result in self._tier.get_finished_jobs():
            self._end(self._jobs.pop(result.job_id), result.success)

    def _look(self, operation: Operation) -> None:
        found = self._tier.lookup(operation.key, operation.context)
        if found is LookupResult.HIT:
            self._submit(operation)
        elif found is LookupResult.MISS or operation.abandoned:
            operation.found = False
            self._end(operation, False)
        else:
            self._looking.append(operation)

    def _submit(self, operation: Operation) -> None:
        number = next(self._numbers)
        self._jobs[number] = operation
        slots = np.array([operation.slot], dtype=np.int64)
        job = TransferJob(number, [operation.key], slots, operation.load, operation.context)
        if operation.load:
            self._tier.submit_load(job)
        else:
            self._tier.submit_store(job)

    def _end(self, operation: Operation, success: bool) -> None:
        self._tier.on_request_finished(operation.context)
        self._complete(operation, success)

    def _complete(self, operation: Operation, success: bool) -> None:
        """Tell the caller, or free the slot if he has gone."""
        with self._changed:
            operation.success = success
            operation.done = True
            self._changed.notify_all()
            abandoned = operation.abandoned
        if abandoned:
            self._free(operation.slot)

"""Runs one of vLLM's secondary tiers on its own thread.

vLLM calls a tier from the scheduler's thread, once per step: it repeats lookups that are not
decided, submits jobs, and polls for finished ones. Here a thread makes these calls while there is
work, and callers on other threads wait for their operations.
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
"""Seconds between two steps while jobs run, because a tier cannot notify us of finished jobs."""

_NOTHING = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


@dataclass(eq=False)
class Operation:
    """The store or load of one chunk.

    Attributes:
        key: key of the chunk.
        slot: slot of the staging memory, which belongs to the operation until it is done.
        load: True for a load, False for a store.
        context: vLLM's context of a request. Each operation acts as its own request.
        done: whether the tier no longer uses the slot.
        found: for a load, whether the tier had the chunk.
        success: whether the transfer worked.
        abandoned: whether the caller has given up. Then the driver frees the slot.
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
    """A tier, its thread, and the operations in flight.

    Args:
        tier: an open tier, which :meth:`close` shuts down.
        free: called with the slot of an abandoned operation when the operation is done.
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
        """Store or load a chunk, and wait for it.

        Args:
            key: key of the chunk.
            slot: slot of the staging memory.
            load: True to load, False to store.
            timeout: seconds after which the operation is abandoned.
        """
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
        """Wait at most ``timeout`` seconds for operations in flight, and shut the tier down."""
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
        """Wait for work; False if the driver is closed and there is none."""
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
        """Notify the caller, or free the slot if the caller has given up."""
        with self._changed:
            operation.success = success
            operation.done = True
            self._changed.notify_all()
            abandoned = operation.abandoned
        if abandoned:
            self._free(operation.slot)

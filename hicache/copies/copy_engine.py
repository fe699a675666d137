"""Copies pages between the device's KV cache and a shard of the host pool.

:class:`MemoryCopyEngine` copies at once, on a CPU. The engine for CUDA is in ``stream_engine``.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from vllm_graft.base.errors import GraftError
from vllm_graft.base.log import logger
from vllm_graft.hicache.config.cache_config import flag
from vllm_graft.hicache.faults.injector import FaultInjector
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.messages.operation import CacheOperation, Direction
from vllm_graft.hicache.pages.layout import (
    Copies,
    LayerPages,
    concatenated,
    copies,
    layer_copies,
    layer_order,
)

Pools = Mapping[int, Sequence[LayerPages]]
"""By group number, its layers' pages."""

Convert = Callable[[Copies, Direction], Callable[[int, int], None]]
"""``(runs, direction)``: what copies a range of the runs, and converts them on the way."""


@dataclass(frozen=True)
class HostShard:
    """This rank's slots.

    Attributes:
        address: of slot 0.
        slot_bytes: bytes from a slot to the next.
        pinned_slots: slots that CUDA knows as one piece of memory.
    """

    address: int
    slot_bytes: int
    pinned_slots: int

    @classmethod
    def of(cls, pool: HostPool, shard: int) -> HostShard:
        """One of a pool's."""
        return cls(pool.shard_address(shard), pool.shape.slot_bytes, pool.shape.pinned_slots)


@dataclass
class CopyResult:
    """A finished operation.

    Attributes:
        operation: what was asked for.
        num_bytes: that were copied.
        strided_bytes: of these, by 2D copies straight to blocks or slots.
        staged_bytes: of these, by way of staging memory.
        seconds: what the copies took on their stream, 0 if unknown.
        failed: whether it could not be done.
    """

    operation: CacheOperation
    num_bytes: int = 0
    strided_bytes: int = 0
    staged_bytes: int = 0
    seconds: float = 0.0
    failed: bool = False


def raise_incomplete() -> NoReturn:
    """Stop a step whose KV did not arrive: going on would give wrong tokens."""
    raise GraftError(
        "a copy that this step reads failed twice (see the log before), and vLLM cannot compute "
        "its tokens again within the step. With --kv-transfer-config.kv_load_failure_policy=fail "
        "its requests would end instead (models with one KV cache group); "
        f"{flag('load')}=async recomputes them."
    )


class CopyEngine(ABC):
    """Executes operations. None raises: what cannot be done has failed.

    Args:
        pools: where the pages of each group are on the device.
        shard: where they are on the host.
        injector: makes copies fail, but not the second try of a load within a step.
        convert: makes all copies, where the host keeps pages in another type.
    """

    def __init__(
        self,
        pools: Pools,
        shard: HostShard,
        injector: FaultInjector | None = None,
        convert: Convert | None = None,
    ) -> None:
        self.second_tries = 0
        self._incomplete: list[CacheOperation] = []
        self._pools = pools
        self._shard = shard
        self._injector = injector
        self._convert = convert

    @abstractmethod
    def begin_step(self, number: int = 0) -> None:
        """A step begins: everything that earlier steps put on the compute stream is before it.

        Args:
            number: of the step, to time it; 0 if its time is of no interest.
        """

    @abstractmethod
    def end_step(self) -> None:
        """All of the step is on the compute stream."""

    @abstractmethod
    def step_seconds(self) -> dict[int, float]:
        """What steps took that have ended since the last call, by number."""

    @abstractmethod
    def store(self, operation: CacheOperation) -> None:
        """Copy to the host what the work put on the compute stream so far has written."""

    @abstractmethod
    def load(self, operation: CacheOperation) -> None:
        """Copy to the device, into blocks that no work of this step touches."""

    @abstractmethod
    def load_now(self, operation: CacheOperation) -> None:
        """Copy to the device, and order later work of the compute stream behind it.

        A copy that fails is tried once more: the step that reads it cannot be put off. If that
        fails as well, :meth:`take_incomplete` has the operation.
        """

    @abstractmethod
    def load_layers(self, operation: CacheOperation, first: Collection[str]) -> None:
        """As :meth:`load_now`, a layer at a time; see :meth:`wait_layer`.

        Args:
            operation: what to copy.
            first: layers that are copied before all others.
        """

    @property
    def strided(self) -> bool:
        """Whether 2D copies are made where blocks and slots allow it."""
        return False

    @property
    def staged(self) -> bool:
        """Whether loads go by way of staging memory where only their slots allow 2D copies."""
        return False

    def take_incomplete(self) -> list[CacheOperation]:
        """Loads within the step that failed: what it computes from their blocks is wrong."""
        incomplete, self._incomplete = self._incomplete, []
        return incomplete

    @abstractmethod
    def wait_layer(self, layer: str) -> None:
        """Order later work of the compute stream behind the load of one layer."""

    @abstractmethod
    def wait_all_layers(self) -> int:
        """The same for every layer that has not been waited for; returns how many."""

    @abstractmethod
    def fence(self, jobs: Collection[int]) -> None:
        """Order later work of the compute stream behind stores that are in flight."""

    @abstractmethod
    def finished(self) -> list[CopyResult]:
        """Operations that have ended since the last call."""

    @abstractmethod
    def drain(self) -> None:
        """Block until nothing is in flight."""

    def _inject(self) -> None:
        if self._injector is not None:
            self._injector.before("copy")

    def _copies(self, operation: CacheOperation) -> Copies:
        if self._convert is not None:
            # Sizes differ on both sides, so none are merged.
            return self._layer_copies(operation)[0]
        return concatenated(
            [
                copies(
                    self._pools[part.group],
                    part.device_indices,
                    part.host_indices,
                    self._shard.slot_bytes,
                    self._shard.address,
                    self._shard.pinned_slots,
                )
                for part in operation.transfers
                if self._pools[part.group] and len(part)
            ]
        )

    def _layer_copies(self, operation: CacheOperation) -> tuple[Copies, dict[str, tuple[int, int]]]:
        return layer_copies(
            (
                (self._pools[part.group], part.device_indices, part.host_indices)
                for part in operation.transfers
            ),
            self._shard.slot_bytes,
            self._shard.address,
        )

    def _layers(self, operation: CacheOperation, first: Collection[str]) -> list[str]:
        names = {
            layer.name for transfer in operation.transfers for layer in self._pools[transfer.group]
        }
        return sorted(names, key=lambda name: (name not in first, layer_order(name)))


class MemoryCopyEngine(CopyEngine):
    """Copies with the CPU, before the call returns."""

    def __init__(
        self,
        pools: Pools,
        shard: HostShard,
        injector: FaultInjector | None = None,
        convert: Convert | None = None,
    ) -> None:
        super().__init__(pools, shard, injector, convert)
        self._results: list[CopyResult] = []
        self._step = 0, 0.0
        self._step_seconds: dict[int, float] = {}

    def begin_step(self, number: int = 0) -> None:
        """Note the time."""
        self._step = number, time.perf_counter()

    def end_step(self) -> None:
        """The work is done by now."""
        number, begun = self._step
        if number:
            self._step_seconds[number] = time.perf_counter() - begun
        self._step = 0, 0.0

    def step_seconds(self) -> dict[int, float]:
        """What steps took that have ended since the last call, by number."""
        seconds, self._step_seconds = self._step_seconds, {}
        return seconds

    def store(self, operation: CacheOperation) -> None:
        """Copy at once."""
        self._copy(operation)

    def load(self, operation: CacheOperation) -> None:
        """Copy at once."""
        self._copy(operation)

    def load_now(self, operation: CacheOperation) -> None:
        """Copy at once."""
        self._copy(operation)
        if self._results[-1].failed:
            self._results.pop()
            self.second_tries += 1
            self._copy(operation, may_fail=False)
            if self._results[-1].failed:
                self._incomplete.append(operation)

    def load_layers(self, operation: CacheOperation, first: Collection[str]) -> None:
        """Copy at once: there is nothing to overlap with."""
        self.load_now(operation)

    def wait_layer(self, layer: str) -> None:
        """Nothing is in flight."""

    def wait_all_layers(self) -> int:
        """Nothing is in flight."""
        return 0

    def fence(self, jobs: Collection[int]) -> None:
        """Nothing is in flight."""

    def finished(self) -> list[CopyResult]:
        """Operations that have ended since the last call."""
        results, self._results = self._results, []
        return results

    def drain(self) -> None:
        """Nothing is in flight."""

    def _copy(self, operation: CacheOperation, may_fail: bool = True) -> None:
        start = time.perf_counter()
        result = CopyResult(operation)
        try:
            if may_fail:
                self._inject()
            batch = self._copies(operation)
            (self._convert or _move)(batch, operation.direction)(0, len(batch))
            result.num_bytes = batch.num_bytes
        except Exception:
            # Recomputed, or failed, by the engine's policy: never the worker's end.
            logger.exception("host KV cache: a copy failed")
            result.failed = True
        result.seconds = time.perf_counter() - start
        self._results.append(result)


def _move(runs: Copies, direction: Direction) -> Callable[[int, int], None]:
    source, target = runs.device, runs.host
    if direction is Direction.LOAD:
        source, target = target, source

    def copy(begin: int, end: int) -> None:
        for to, at, size in zip(
            *(column[begin:end].tolist() for column in (target, source, runs.sizes))
        ):
            ctypes.memmove(to, at, size)

    return copy

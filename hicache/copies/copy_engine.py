"""Copy engines move pages between the device's KV cache and a shard of the host pool.
:class:`MemoryCopyEngine` copies at once, on a CPU. The engine for CUDA is in ``streams``."""

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from vllm_graft.base.errors import GraftError
from vllm_graft.base.log import logger
from vllm_graft.hicache.config.cache_config import flag
from vllm_graft.hicache.copies.strided import HostShard, RangeCopy
from vllm_graft.hicache.messages.operation import CacheOperation, Direction
from vllm_graft.hicache.pages.layout import (
    Copies,
    LayerPages,
    copies,
    layer_copies,
    layer_order,
    stacked,
)

Pools = Mapping[int, Sequence[LayerPages]]
"""Maps the number of each group to the pages of its layers."""

Convert = Callable[[Copies, Direction], RangeCopy]
"""``(runs, direction)``: returns a function that copies and converts a range of the runs."""

Unfit = Callable[[Copies], npt.NDArray[np.bool_]]
"""``(runs)``: whether runs that were stored did not fit into the host's form, bool ``[n]``."""


@dataclass
class CopyResult:
    """A finished operation; see ``Transferred`` for the parts of its bytes."""

    operation: CacheOperation
    num_bytes: int = 0
    strided_bytes: int = 0
    staged_bytes: int = 0
    seconds: float = 0.0
    """Duration of the copies on their stream; 0 if unknown."""
    failed: bool = False
    unfit: list[int] = field(default_factory=list)
    """Slots of a store whose pages are not there, as they do not fit into the host's form."""


def raise_incomplete() -> NoReturn:
    """Stop a step whose KV did not arrive, because it would compute wrong tokens."""
    raise GraftError(
        "a copy that this step reads failed twice (see the log before), and vLLM cannot compute "
        "its tokens again within the step. With --kv-transfer-config.kv_load_failure_policy=fail "
        "its requests would end instead (models with one KV cache group); "
        f"{flag('load')}=async recomputes them."
    )


class CopyEngine(ABC):
    """Executes operations. A copy that fails raises nothing: its result says that it failed.
    ``convert`` makes all copies, if the host keeps pages in another form. Pages that are `unfit`
    for it may be in any store."""

    def __init__(
        self,
        pools: Pools,
        shard: HostShard,
        convert: Convert | None = None,
        unfit: Unfit | None = None,
    ) -> None:
        self.second_tries = 0
        self._incomplete: list[CacheOperation] = []
        self._pools, self._shard, self._convert, self._unfit = pools, shard, convert, unfit

    @abstractmethod
    def begin_step(self, number: int = 0) -> None:
        """Begin a step, after all work of earlier steps was put on the compute stream. Its time is
        reported by its number; that of number 0 is not measured."""

    @abstractmethod
    def end_step(self) -> None:
        """End a step, whose work is now completely on the compute stream."""

    @abstractmethod
    def step_seconds(self) -> dict[int, float]:
        """Seconds of each step that has ended since the last call, by its number."""

    @abstractmethod
    def store(self, operation: CacheOperation) -> None:
        """Copy pages to the host, after all work that is on the compute stream so far."""

    @abstractmethod
    def load(self, operation: CacheOperation) -> None:
        """Copy pages to the device, into blocks that no work of this step reads or writes."""

    @abstractmethod
    def load_now(self, operation: CacheOperation) -> None:
        """Copy pages to the device, and let later work of the compute stream wait for it. It is
        tried twice, because the step that reads it cannot be postponed. If both tries fail,
        :meth:`take_incomplete` returns the operation."""

    @abstractmethod
    def load_layers(self, operation: CacheOperation, first: Collection[str]) -> None:
        """Copy pages as :meth:`load_now` does, but layer by layer, the layers ``first`` first."""

    @property
    def strided(self) -> bool:
        """Whether the engine makes 2D copies if blocks and slots allow it."""
        return False

    @property
    def staged(self) -> bool:
        """Whether loads go through staging memory if only their slots allow 2D copies."""
        return False

    def take_incomplete(self) -> list[CacheOperation]:
        """Return the failed loads of this step, which reads invalid blocks because of them."""
        incomplete, self._incomplete = self._incomplete, []
        return incomplete

    @abstractmethod
    def wait_layer(self, layer: str) -> None:
        """Let later work of the compute stream wait for the load of one layer."""

    @abstractmethod
    def wait_all_layers(self) -> int:
        """Call :meth:`wait_layer` for each layer that was not waited for; return their number."""

    @abstractmethod
    def fence(self, jobs: Collection[int]) -> None:
        """Let later work of the compute stream wait for those of ``jobs`` that are in flight."""

    @abstractmethod
    def finished(self) -> list[CopyResult]:
        """Results of the operations that have ended since the last call. It never waits."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until no copy is in flight."""

    def _copies(self, operation: CacheOperation) -> Copies:
        if self._convert is not None:
            # Bytes differ between device and host, so runs cannot be merged.
            return self._layer_copies(operation)[0]
        return stacked(
            [
                copies(
                    self._pools[transfer.group],
                    transfer.device_indices,
                    transfer.host_indices,
                    self._shard.slot_bytes,
                    self._shard.address,
                    self._shard.pinned_slots,
                )
                for transfer in operation.transfers
                if self._pools[transfer.group] and len(transfer)
            ]
        )

    def _layer_copies(self, operation: CacheOperation) -> tuple[Copies, dict[str, tuple[int, int]]]:
        return layer_copies(
            (
                (self._pools[transfer.group], transfer.device_indices, transfer.host_indices)
                for transfer in operation.transfers
            ),
            self._shard.slot_bytes,
            self._shard.address,
        )

    def _unfit_slots(self, operation: CacheOperation, runs: Copies) -> list[int]:
        """The slots of an operation that has ended whose pages do not fit."""
        if self._unfit is None or operation.direction is Direction.LOAD:
            return []
        places = runs.host[self._unfit(runs)] - self._shard.address
        return sorted(set((places // self._shard.slot_bytes).tolist()))

    def _layers(self, operation: CacheOperation, first: Collection[str]) -> list[str]:
        names = {
            layer.name for transfer in operation.transfers for layer in self._pools[transfer.group]
        }
        return sorted(names, key=lambda name: (name not in first, layer_order(name)))


class MemoryCopyEngine(CopyEngine):
    """Copies with the CPU. Every copy ends before its call returns, so none is in flight."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._results: list[CopyResult] = []
        self._step = 0, 0.0
        self._step_seconds: dict[int, float] = {}

    def begin_step(self, number: int = 0) -> None:
        self._step = number, time.perf_counter()

    def end_step(self) -> None:
        number, begun = self._step
        if number:
            self._step_seconds[number] = time.perf_counter() - begun
        self._step = 0, 0.0

    def step_seconds(self) -> dict[int, float]:
        seconds, self._step_seconds = self._step_seconds, {}
        return seconds

    def store(self, operation: CacheOperation) -> None:
        self._copy(operation)

    def load(self, operation: CacheOperation) -> None:
        self._copy(operation)

    def load_now(self, operation: CacheOperation) -> None:
        self._copy(operation)
        if self._results[-1].failed:
            self._results.pop()
            self.second_tries += 1
            self._copy(operation)
            if self._results[-1].failed:
                self._incomplete.append(operation)

    def load_layers(self, operation: CacheOperation, first: Collection[str]) -> None:
        self.load_now(operation)

    def wait_layer(self, layer: str) -> None:
        pass

    def wait_all_layers(self) -> int:
        return 0

    def fence(self, jobs: Collection[int]) -> None:
        pass

    def finished(self) -> list[CopyResult]:
        results, self._results = self._results, []
        return results

    def drain(self) -> None:
        pass

    def _copy(self, operation: CacheOperation) -> None:
        start = time.perf_counter()
        result = CopyResult(operation)
        try:
            batch = self._copies(operation)
            (self._convert or _move)(batch, operation.direction)(0, len(batch))
            result.num_bytes = batch.num_bytes
            result.unfit = self._unfit_slots(operation, batch)
        except Exception:
            # The worker goes on. vLLM recomputes or ends the request, as its policy says.
            logger.exception("host KV cache: a copy failed")
            result.failed = True
        result.seconds = time.perf_counter() - start
        self._results.append(result)


def _move(runs: Copies, direction: Direction) -> RangeCopy:
    source, target = runs.device, runs.host
    if direction is Direction.LOAD:
        source, target = target, source

    def copy(begin: int, end: int) -> None:
        for to, at, size in zip(
            *(column[begin:end].tolist() for column in (target, source, runs.sizes))
        ):
            ctypes.memmove(to, at, size)

    return copy


E4M3_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def fp8_copy(dtype: torch.dtype, runs: Copies, direction: Direction) -> RangeCopy:
    """Prepare copies by the CPU between K/V of ``dtype`` on the device and e4m3 on the host. e4m3
    is OCP's 8-bit floating point: one byte per element, here without a scale. Values are rounded to
    the nearest, ties to even. They saturate: what is over 448, infinities included, becomes 448.
    NaN stays NaN. The way back is exact. The sizes of the runs are bytes on the host."""

    def copy(begin: int, end: int) -> None:
        columns = (column[begin:end].tolist() for column in (runs.device, runs.host, runs.sizes))
        for device, host, count in zip(*columns):
            there = elements_at(device, count, dtype)
            here = elements_at(host, count, torch.float8_e4m3fn)
            if direction is Direction.STORE:
                # Torch's own cast saturates only in some versions.
                here.copy_(there.clamp(-E4M3_LARGEST, E4M3_LARGEST))
            else:
                there.copy_(here)

    return copy


def elements_at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The ``count`` elements of the CPU's memory from ``address`` on."""
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)

"""Messages of each step: the scheduler's orders to the ranks, and the reports of the ranks."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Self

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_graft.hicache.messages.operation import CacheOperation


@dataclass
class HiCacheMetadata(KVConnectorMetadata):
    """The ranks' work in one step.

    Attributes:
        early_stores: stores of blocks freed since the last step, read before the forward pass.
        stores: stores of blocks that this step's forward pass completes.
        sync_loads: loads into blocks that this step's forward pass reads.
        async_loads: loads for requests that wait outside of steps.
        failed_loads: requests that wait outside of steps and whose load is impossible.
        failed_blocks: blocks that this step reads although their load is impossible.
        fences: store jobs whose source blocks this step gives to other requests.
        step: number of the step, which the ranks report with its time. 0 without a forward pass.
    """

    early_stores: list[CacheOperation] = field(default_factory=list)
    stores: list[CacheOperation] = field(default_factory=list)
    sync_loads: list[CacheOperation] = field(default_factory=list)
    async_loads: list[CacheOperation] = field(default_factory=list)
    failed_loads: list[str] = field(default_factory=list)
    failed_blocks: list[int] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
    step: int = 0


@dataclass
class Transferred:
    """Totals of finished copies in one direction, on one rank or summed over ranks. 2D copies moved
    ``strided_bytes`` straight to blocks or slots; ``staged_bytes`` went through staging memory."""

    bytes: int = 0
    strided_bytes: int = 0
    staged_bytes: int = 0
    seconds: float = 0.0

    def add(
        self, num_bytes: int, seconds: float, strided_bytes: int = 0, staged_bytes: int = 0
    ) -> None:
        self.merge(Transferred(num_bytes, strided_bytes, staged_bytes, seconds))

    def merge(self, other: "Transferred") -> None:
        for total in fields(self):
            name = total.name
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class HiCacheReport(KVConnectorWorkerMetadata):
    """What ranks have finished. For each job it has how many ranks have ``done`` it, and how many
    of these have ``failed``. Of stores that are done, ``unfit`` has slots without their page."""

    done: Counter[int] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)
    unfit: set[int] = field(default_factory=set)
    loads: Transferred = field(default_factory=Transferred)
    stores: Transferred = field(default_factory=Transferred)
    unwaited_layers: int = 0
    """Layers that no hook waited for, so that the end of the forward pass waited for their load."""
    steps: dict[int, float] = field(default_factory=dict)
    """Seconds that the device took for each ended step, by the step's number."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Self:
        if not isinstance(other, HiCacheReport):
            raise TypeError(f"cannot add a {type(other).__name__} to a HiCacheReport")
        self.done.update(other.done)
        self.failed.update(other.failed)
        self.unfit |= other.unfit
        self.loads.merge(other.loads)
        self.stores.merge(other.stores)
        self.unwaited_layers += other.unwaited_layers
        for number, seconds in other.steps.items():
            self.steps[number] = max(seconds, self.steps.get(number, 0.0))
        return self

    def mark(self, jobs: list[int], failed: bool = False) -> None:
        self.done.update(jobs)
        if failed:
            self.failed.update(jobs)

    @property
    def empty(self) -> bool:
        return not self.done and not self.unwaited_layers and not self.steps

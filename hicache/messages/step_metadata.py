"""What the scheduler tells the ranks each step, and what they report back."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_graft.hicache.messages.operation import CacheOperation


@dataclass
class HiCacheMetadata(KVConnectorMetadata):
    """Work of one step.

    Attributes:
        early_stores: stores of blocks that were freed since the last step: read before the
            forward pass may overwrite them.
        stores: stores of blocks that this step's forward pass completes.
        sync_loads: loads that this step's forward pass reads.
        async_loads: loads that requests wait for outside of steps.
        failed_loads: requests outside of steps whose load cannot be done.
        failed_blocks: blocks that this step reads and whose load cannot be done.
        fences: jobs that read blocks which this step hands to others.
        step: number of the step, by which the ranks tell its time; 0 without a forward pass.
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
    """Bytes and seconds of finished copies in one direction, on one rank or summed over ranks.

    Attributes:
        bytes: of the copies.
        strided_bytes: of these, by 2D copies straight to blocks or slots.
        staged_bytes: of these, by way of staging memory.
        seconds: that they took.
        copies: their number.
    """

    bytes: int = 0
    strided_bytes: int = 0
    staged_bytes: int = 0
    seconds: float = 0.0
    copies: int = 0

    def add(
        self, num_bytes: int, seconds: float, strided_bytes: int = 0, staged_bytes: int = 0
    ) -> None:
        """Count one copy."""
        self.bytes += num_bytes
        self.strided_bytes += strided_bytes
        self.staged_bytes += staged_bytes
        self.seconds += seconds
        self.copies += 1

    def merge(self, other: Transferred) -> None:
        """Count the copies of another rank, or of another step."""
        self.bytes += other.bytes
        self.strided_bytes += other.strided_bytes
        self.staged_bytes += other.staged_bytes
        self.seconds += other.seconds
        self.copies += other.copies


@dataclass
class HiCacheReport(KVConnectorWorkerMetadata):
    """What ranks have finished: counts by job, so that reports of ranks can be added."""

    done: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    loads: Transferred = field(default_factory=Transferred)
    stores: Transferred = field(default_factory=Transferred)
    unwaited_layers: int = 0
    """Layers whose load was not waited for by their hook but at the end of the forward pass."""
    steps: dict[int, float] = field(default_factory=dict)
    """Seconds that the device took for steps that have ended, by their numbers."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> HiCacheReport:
        """Add another rank's report to this one."""
        if not isinstance(other, HiCacheReport):
            raise TypeError(f"cannot add a {type(other).__name__} to a HiCacheReport")
        for mine, theirs in ((self.done, other.done), (self.failed, other.failed)):
            for job, count in theirs.items():
                mine[job] = mine.get(job, 0) + count
        self.loads.merge(other.loads)
        self.stores.merge(other.stores)
        self.unwaited_layers += other.unwaited_layers
        for number, seconds in other.steps.items():
            self.steps[number] = max(seconds, self.steps.get(number, 0.0))
        return self

    def mark(self, jobs: list[int], failed: bool = False) -> None:
        """This rank has finished jobs."""
        for job in jobs:
            self.done[job] = self.done.get(job, 0) + 1
            if failed:
                self.failed[job] = self.failed.get(job, 0) + 1

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.done and not self.unwaited_layers and not self.steps

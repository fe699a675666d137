"""The 2D copies of an operation: straight to blocks and slots, or through a ring of buffers."""

from __future__ import annotations

from collections.abc import Callable

from vllm_graft.base.log import logger
from vllm_graft.hicache.copies.copy_engine import HostShard, Pools
from vllm_graft.hicache.copies.page_kernel import ALIGNMENT, RangeCopy
from vllm_graft.hicache.copies.planned_copy import PlannedCopy
from vllm_graft.hicache.copies.staged_plan import StagedCopies, StagedPlanner
from vllm_graft.hicache.copies.staging_ring import StagingRing
from vllm_graft.hicache.copies.strided import StridedDriver, StridedPlanner
from vllm_graft.hicache.messages.operation import CacheOperation, Direction
from vllm_graft.hicache.pages.layout import Copies


class RowCopies:
    """Plans and prepares 2D copies. If one fails, it makes no more of that kind.

    Args:
        pools: places of each group's pages on the device.
        shard: places of the pages on the host, in pinned memory.
        driver: makes 2D copies.
        ring: buffers on the device that loads may go through; None for none.
        run_copy: prepares the copies from the ring's buffers to blocks.

    Attributes:
        strided: whether 2D copies are made. False after the driver has refused one.
        staged: whether loads go through the ring. False without a ring, and after a failure.
        ring: the ring. None also if the pages of no pool fit into its buffers.
    """

    def __init__(
        self,
        pools: Pools,
        shard: HostShard,
        driver: StridedDriver,
        ring: StagingRing | None,
        run_copy: Callable[[Copies], RangeCopy],
    ) -> None:
        host = shard.slot_bytes, shard.address, shard.pinned_slots
        self._driver = driver
        self._run_copy = run_copy
        self._planner = StridedPlanner(pools, *host, driver.max_pitch)
        self.strided = True
        if ring is not None:
            columns = self._planner.columns
            self._stager = StagedPlanner(columns, *host, ALIGNMENT, ring.buffers)
            if not self._stager.serves:
                logger.info("host KV cache: no page is of a size for staging memory, there is none")
                ring = None
        self.ring = ring
        self.staged = ring is not None

    def prepare(
        self, operation: CacheOperation, by_layer: bool, staged: bool
    ) -> tuple[list[PlannedCopy], CacheOperation | None]:
        """Prepare the 2D copies of an operation, on the stream of its direction.

        Args:
            operation: the operation.
            by_layer: whether its layers are copied one by one.
            staged: whether a load may go through the ring.

        Returns:
            The 2D copies, and the rest of the operation, for which 2D copies do not pay; None if
            there is no rest.
        """
        planned: list[PlannedCopy] = []
        rest: CacheOperation | None = operation
        plan = self._planner.plan(operation, by_layer) if self.strided else None
        if plan is not None:
            copy = self._watched(
                self._driver.prepare(plan.copies, operation.direction), self._no_rows
            )
            planned.append(PlannedCopy(plan.copies, copy, plan.ranges))
            rest = plan.rest
        load = operation.direction is Direction.LOAD
        ring = self.ring if load and staged and self.staged and self.strided else None
        if ring is not None and rest is not None:
            found = self._stager.plan(rest, by_layer)
            if found is not None:
                planned.append(
                    PlannedCopy(found.copies, self._through(ring, found.copies), found.ranges)
                )
                rest = found.rest
        return planned, rest

    def join(self, planned: list[PlannedCopy], stream: object) -> None:
        """Let later work of the loads' stream wait for all of the planned copies."""
        if self.ring is not None and _staged(planned):
            self.ring.join(stream)

    def behind(self, planned: list[PlannedCopy], stream: object) -> object:
        """The stream on which an event comes after everything that was enqueued of a load.

        Args:
            planned: the load's planned copies.
            stream: the stream of loads.
        """
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

"""The controller of the scheduler's side: it reserves slots, issues jobs and completes them. The
ranks only execute, so they never have to agree on anything. A job is done when every rank has
reported it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_graft.hicache.host.index import HostIndex, Page
from vllm_graft.hicache.messages.operation import CacheOperation, Direction, PoolTransfer
from vllm_graft.hicache.pages.groups import Group
from vllm_graft.hicache.pages.page_key import PageKey

PageBlocks = Sequence[tuple[PageKey, int]]
"""Pairs of a page's key, whose ``pool`` is the group's number, and its block on the device."""


@dataclass
class Job:
    """An operation in flight.

    Attributes:
        waiting: number of ranks that have not reported the job.
        failed: whether a rank could not do it.
        stale: whether the cache was reset meanwhile, so that its pages are no longer wanted.
    """

    operation: CacheOperation
    pages: list[Page]
    waiting: int
    failed: bool = False
    stale: bool = False


@dataclass
class Finished:
    """The jobs that ended with a report of the ranks."""

    stored: list[Page] = field(default_factory=list)
    failed_loads: int = 0
    failed_stores: int = 0
    unfit: int = 0
    """Pages that a rank could not bring into the host's form, and that are forgotten."""
    failed_requests: list[str] = field(default_factory=list)
    """Requests whose load failed, so that their blocks are invalid."""


class HybridCacheController:
    """Reserves slots and issues and completes operations over all pools, all or nothing."""

    def __init__(self, groups: Sequence[Group], index: HostIndex, num_workers: int) -> None:
        self.groups = {group.index: group for group in groups}
        self.index = index
        self.jobs: dict[int, Job] = {}
        self.declined_stores = 0
        self._num_workers = num_workers
        self._next_job = 0
        self._source_jobs: dict[int, set[int]] = {}

    def store(
        self, source: PageBlocks, priority: int = 0, volatile: bool = False
    ) -> CacheOperation | None:
        """Reserve slots for pages of one request in all pools, and issue a store of them. Pages
        that the host has already, or that are on their way to it, are left out. The result is None
        if no page is left to store, or if there is not enough room for all of them, which
        ``declined_stores`` counts. Volatile pages are not written to storage."""
        wanted = dict(source)
        # All pools share the slots, so one reservation takes all slots or changes nothing.
        pages = self.index.reserve(list(wanted), blocks=list(wanted.values()))
        if not pages:
            self.declined_stores += pages is None
            return None
        blocks = [wanted[page.key] for page in pages]
        for page in pages:
            page.volatile = volatile
        operation = self._issue(Direction.STORE, pages, blocks, priority, [])
        for block in blocks:
            self._source_jobs.setdefault(block, set()).update(operation.ids)
        return operation

    def load(self, source: PageBlocks, request_id: str) -> CacheOperation | None:
        """Hold pages of one request in all pools, and issue a load of them to these blocks. The
        result is None, with nothing held, if the host does not have all of the pages."""
        pages = self.index.hold([key for key, _ in source])
        if pages is None:
            return None
        blocks = [block for _, block in source]
        return self._issue(Direction.LOAD, pages, blocks, 0, [request_id])

    @property
    def stores_in_flight(self) -> bool:
        return bool(self._source_jobs)

    def jobs_reading(self, blocks: Iterable[int]) -> set[int]:
        """Stores in flight whose source is one of these device blocks."""
        return {job for block in blocks for job in self._source_jobs.get(block, ())}

    def cancel(self, operation: CacheOperation) -> None:
        """Withdraw an operation that was not sent to the ranks."""
        for number in operation.ids:
            job = self._remove(number)
            if operation.direction is Direction.STORE:
                self.index.forget(job.pages)
            self.index.release(job.pages)

    def drop_stores(self) -> None:
        """Let all stores in flight end as failed, because the KV that they read was wrong."""
        for job in self.jobs.values():
            if job.operation.direction is Direction.STORE:
                job.failed = True

    def report(
        self, done: Mapping[int, int], failed: Mapping[int, int], unfit: Collection[int] = ()
    ) -> Finished:
        """Take in how many ranks have done each job, how many of these have failed, and which slots
        of their stores have no page, as it does not fit into the host's form."""
        finished = Finished()
        for number, count in done.items():
            job = self.jobs.get(number)
            if job is None:
                continue
            job.waiting -= count
            job.failed |= failed.get(number, 0) > 0
            if unfit and job.operation.direction is Direction.STORE:
                lost = [page for page in job.pages if page.indexed and page.slot in unfit]
                self.index.forget(lost)
                finished.unfit += len(lost)
            if job.waiting <= 0:
                self._complete(self._remove(number), finished)
        return finished

    def reset(self) -> None:
        """Forget all pages. Jobs in flight end without effect."""
        for job in self.jobs.values():
            job.stale = True
        self.index.clear()

    def _issue(
        self,
        direction: Direction,
        pages: list[Page],
        blocks: Sequence[int],
        priority: int,
        request_ids: list[str],
    ) -> CacheOperation:
        pairs: dict[int, tuple[list[int], list[int]]] = {page.key.pool: ([], []) for page in pages}
        for page, block in zip(pages, blocks):
            host, device = pairs[page.key.pool]
            host.append(page.slot)
            device.append(block)
        transfers = [PoolTransfer(pool, *indices) for pool, indices in pairs.items()]
        number, self._next_job = self._next_job, self._next_job + 1
        operation = CacheOperation([number], direction, transfers, priority, request_ids)
        self.jobs[number] = Job(operation, pages, self._num_workers)
        return operation

    def _remove(self, number: int) -> Job:
        job = self.jobs.pop(number)
        if job.operation.direction is Direction.STORE:
            for transfer in job.operation.transfers:
                for block in transfer.device_indices:
                    jobs = self._source_jobs.get(block, set())
                    jobs.discard(number)
                    if not jobs:
                        self._source_jobs.pop(block, None)
        return job

    def _complete(self, job: Job, finished: Finished) -> None:
        store = job.operation.direction is Direction.STORE
        if job.failed:
            # The pages are forgotten, so that the next request with this prefix recomputes it
            # instead of failing again.
            self.index.forget(job.pages)
            self.index.release(job.pages)
            finished.failed_stores += store
            finished.failed_loads += not store
            finished.failed_requests += job.operation.request_ids
        elif store:
            self.index.commit(job.pages)
            finished.stored += [] if job.stale else job.pages
        else:
            self.index.release(job.pages)

"""The prefetch of one request: which pages were loaded, and how long the request waits."""

import threading
from collections.abc import Callable, Sequence

from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus


class PrefetchOperation:
    """The load of a request's pages from storage into host memory.

    Attributes:
        deadline: time on the clock, in seconds, at which the request stops waiting and uses the
            pages loaded by then; infinite to wait for all pages, None not to wait.
        limit: number of leading keys that are useful. The next key has failed, if there is one.
        loaded: number of leading keys whose pages are in host memory.
        cancelled: whether :meth:`cancel` ended the operation.
        timed_out: whether the deadline ended it.
    """

    def __init__(
        self,
        request_id: str,
        keys: Sequence[PageKey],
        deadline: float | None,
        clock: Callable[[], float],
    ) -> None:
        self.request_id = request_id
        self.keys = tuple(keys)
        self.deadline = deadline
        self.limit = len(self.keys)
        self.loaded = 0
        self.cancelled = False
        self.timed_out = False
        self._clock = clock
        self._lock = threading.Lock()
        self._status: list[ReadStatus | None] = [None] * len(self.keys)

    @property
    def ended(self) -> bool:
        """Whether no more pages will be loaded."""
        return self.cancelled or self.timed_out or self.loaded >= self.limit

    def may_run(self) -> bool:
        """Whether the request may run now. If so, the caller should cancel the rest."""
        self.expire()
        return self.deadline is None or self.ended

    def cancel(self) -> None:
        """End the operation, unless it has ended. Any thread may call it, any number of times."""
        with self._lock:
            if not self.ended:
                self.cancelled = True

    def expire(self) -> None:
        """End the operation if its deadline has passed."""
        if self.deadline is not None and self._clock() >= self.deadline:
            with self._lock:
                if not self.ended:
                    self.timed_out = True

    def wants(self, index: int) -> bool:
        """Whether the page ``keys[index]`` is still useful."""
        return not self.ended and index < self.limit

    def resolve(self, index: int, status: ReadStatus) -> None:
        with self._lock:
            if self.ended:
                return
            self._status[index] = status
            if status is not ReadStatus.HIT:
                self.limit = min(self.limit, index)
            while self.loaded < self.limit and self._status[self.loaded] is ReadStatus.HIT:
                self.loaded += 1

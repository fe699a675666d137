"""The prefetch of one request: which pages were loaded, and how long the request waits."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence

from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus


class PrefetchPolicy(enum.Enum):
    """How long a scheduled request waits for its prefetch. These are SGLang's three policies."""

    BEST_EFFORT = "best_effort"
    """The request does not wait. It uses the loaded pages and cancels the rest."""

    WAIT_COMPLETE = "wait_complete"
    """The request waits until all pages were loaded or failed."""

    TIMEOUT = "timeout"
    """The request also stops waiting at a deadline, and uses the pages loaded by then."""


class PrefetchOperation:
    """The load of a request's pages from storage into host memory.

    Attributes:
        request_id: the request that wants the pages.
        keys: keys of the pages. A page is useful only with all pages before it.
        policy: how long the request waits.
        deadline: time on the prefetcher's clock, in seconds; None without a timeout.
    """

    def __init__(
        self,
        request_id: str,
        keys: Sequence[PageKey],
        policy: PrefetchPolicy,
        deadline: float | None,
        clock: Callable[[], float],
    ) -> None:
        self.request_id = request_id
        self.keys = tuple(keys)
        self.policy = policy
        self.deadline = deadline
        self._clock = clock
        self._lock = threading.Lock()
        self._status: list[ReadStatus | None] = [None] * len(self.keys)
        self._limit = len(self.keys)
        self._loaded = 0
        self._cancelled = False
        self._timed_out = False

    @property
    def limit(self) -> int:
        """Number of leading keys that are useful. The next key has failed, if there is one."""
        return self._limit

    @property
    def loaded(self) -> int:
        """Number of leading keys whose pages are in host memory."""
        return self._loaded

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` ended the operation."""
        return self._cancelled

    @property
    def timed_out(self) -> bool:
        """Whether the deadline ended the operation."""
        return self._timed_out

    @property
    def ended(self) -> bool:
        """Whether no more pages will be loaded."""
        return self._cancelled or self._timed_out or self._loaded >= self._limit

    def may_run(self) -> bool:
        """Whether the policy lets the request run now. If so, the caller should cancel the rest."""
        self.expire()
        return self.policy is PrefetchPolicy.BEST_EFFORT or self.ended

    def cancel(self) -> None:
        """End the operation, unless it has ended. Any thread may call it, any number of times.

        Loaded pages stay. The other slots are given back at the prefetcher's next poll.
        """
        with self._lock:
            if not self.ended:
                self._cancelled = True

    def expire(self) -> None:
        """End the operation if its deadline has passed."""
        if self.deadline is not None and self._clock() >= self.deadline:
            with self._lock:
                if not self.ended:
                    self._timed_out = True

    def wants(self, index: int) -> bool:
        """Whether the page ``keys[index]`` is still useful."""
        return not self.ended and index < self._limit

    def resolve(self, index: int, status: ReadStatus) -> None:
        """Note the result of loading ``keys[index]``. The prefetcher calls it."""
        with self._lock:
            if self.ended:
                return
            self._status[index] = status
            if status is not ReadStatus.HIT:
                self._limit = min(self._limit, index)
            while self._loaded < self._limit and self._status[self._loaded] is ReadStatus.HIT:
                self._loaded += 1

"""One request's prefetch: what it wants, what came, and whether the request should still wait."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence

from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus


class PrefetchPolicy(enum.Enum):
    """How long a request waits for its prefetch when its turn has come (SGLang's three)."""

    BEST_EFFORT = "best_effort"
    """Not at all: it takes what has come and cancels the rest."""

    WAIT_COMPLETE = "wait_complete"
    """Until everything has come or failed."""

    TIMEOUT = "timeout"
    """Until then or the deadline, whichever is first; what has come by then is taken."""


class PrefetchOperation:
    """Pages on their way from storage into host memory, for one request.

    Attributes:
        request_id: who wants them.
        keys: the pages, in the order in which they are useful.
        policy: how long the request waits.
        deadline: on the prefetcher's clock, in seconds; None without a timeout.
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
        """Keys from here on are of no use: one before them failed."""
        return self._limit

    @property
    def loaded(self) -> int:
        """Leading keys that are in host memory, without a gap."""
        return self._loaded

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` came before the end."""
        return self._cancelled

    @property
    def timed_out(self) -> bool:
        """Whether the deadline came before the end."""
        return self._timed_out

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._cancelled or self._timed_out or self._loaded >= self._limit

    def may_run(self) -> bool:
        """Whether the policy lets the request go now. If True, cancel what has not come."""
        self.expire()
        return self.policy is PrefetchPolicy.BEST_EFFORT or self.ended

    def cancel(self) -> None:
        """Stop. What has come stays; the rest is given back at the prefetcher's next poll.

        Any thread, any number of times, also when everything has come (then it does nothing).
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
        """Whether the page ``keys[index]`` is still of use."""
        return not self.ended and index < self._limit

    def resolve(self, index: int, status: ReadStatus) -> None:
        """Note what became of ``keys[index]``; called by the prefetcher."""
        with self._lock:
            if self.ended:
                return
            self._status[index] = status
            if status is not ReadStatus.HIT:
                self._limit = min(self._limit, index)
            while self._loaded < self._limit and self._status[self._loaded] is ReadStatus.HIT:
                self._loaded += 1

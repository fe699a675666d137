"""A queue of jobs, and the threads that carry them out."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

Job = TypeVar("Job")
Done = TypeVar("Done")


class JobQueue(ABC, Generic[Job, Done]):
    """Jobs that wait, run and have ended. Its threads do not delay the end of the process.

    Attributes of subclasses have to be set before ``__init__`` starts the threads.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._queue: deque[Job] = deque()
        self._finished: list[Done] = []
        self._busy = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"graft-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def take_finished(self) -> list[Done]:
        """The results of jobs that have ended since the last call. No thread uses them any more."""
        with self._changed:
            finished, self._finished = self._finished, []
            return finished

    @abstractmethod
    def _run(self, job: Job) -> Done:
        """Carry out a job; it runs on a thread of the queue."""

    def _join(self, seconds: float) -> bool:
        """End the threads after queued jobs; False if one still runs after ``seconds``."""
        end = time.monotonic() + seconds
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                job = self._queue.popleft()
                self._busy += 1
            done = self._run(job)
            with self._changed:
                self._busy -= 1
                self._finished.append(done)
                self._changed.notify_all()

"""Groups of threads that run the same function."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable


def started(count: int, name: str, run: Callable[[], None]) -> list[threading.Thread]:
    """Start ``count`` threads that call ``run``. They do not delay the end of the process."""
    threads = [
        threading.Thread(target=run, name=f"graft-{name}-{number}", daemon=True)
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    return threads


def joined(threads: Iterable[threading.Thread], seconds: float) -> bool:
    """Wait at most ``seconds`` for the threads to end; False if one still runs."""
    end = time.monotonic() + seconds
    alive = False
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        alive |= thread.is_alive()
    return not alive

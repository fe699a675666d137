"""How much memory there is for host pages, whoever has it now."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where a container's limit stands, in either version of Linux's control groups."""


def machine_bytes() -> int:
    """Bytes of the machine's memory, or of the part of it that this container may use."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits()])


def filesystem_bytes(path: Path) -> int | None:
    """Bytes that a file system has in all, free or not; None where it isn't there."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def _limits() -> Iterator[int]:
    for file in _LIMITS:
        # Not there, or "max".
        with contextlib.suppress(OSError, ValueError):
            yield int(file.read_text())

"""The size of the machine's memory and of file systems, whether it is free or in use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Files with a container's memory limit, in both versions of Linux's control groups."""


def machine_bytes() -> int:
    """Bytes of the machine's memory, or the limit of this container if that is smaller."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits()])


def filesystem_bytes(path: Path) -> int | None:
    """Total bytes of the file system at ``path``; None if there is no such path."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def _limits() -> Iterator[int]:
    for file in _LIMITS:
        # The file may be missing, or say "max".
        with contextlib.suppress(OSError, ValueError):
            yield int(file.read_text())

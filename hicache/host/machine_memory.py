"""The size of the machine's memory and of file systems, whether it is free or in use."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
"""The file that names this process's control group in each hierarchy."""


def machine_bytes() -> int:
    """Bytes of the machine's memory, or of the least limit that holds for this process."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits()])


def filesystem_bytes(path: Path) -> int | None:
    """Total bytes of the file system at ``path``; None if there is no such path."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def unclaimed_bytes(path: Path) -> int:
    """Free bytes of the file system at ``path`` that no sparse file there may still come to take. A
    sparse file, such as vLLM's message queues, takes memory only when it is written to."""
    status = os.statvfs(path)
    claimed = 0
    for file in path.iterdir():
        with contextlib.suppress(OSError):
            found = file.lstat()
            claimed += max(0, found.st_size - 512 * found.st_blocks)
    return status.f_bavail * status.f_frsize - claimed


def _limits() -> Iterator[int]:
    """The memory limits of this process's control group and of all groups above it."""
    for folder, name in _groups():
        for group in (folder, *folder.parents):
            # The file may be missing, or say "max".
            with contextlib.suppress(OSError, ValueError):
                yield int((group / name).read_text())
            if group == _GROUPS:
                break


def _groups() -> Iterator[tuple[Path, str]]:
    """This process's group in each hierarchy that may limit memory, and the limit's file there. The
    roots are among them, because within a container they stand for its group, whose path outside
    may be what is named."""
    older = (_GROUPS / "memory", "memory.limit_in_bytes")
    versions = {"": (_GROUPS, "memory.max"), "memory": older}
    yield from versions.values()
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in versions:
                root, name = versions[controller]
                yield root / path.lstrip("/"), name

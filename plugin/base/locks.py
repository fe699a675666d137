"""Locks on files that say that a process is alive: the kernel frees them when it has ended.

They are ``flock`` locks. They belong to the open file, not to the process: a child that was forked
shares it, and keeps the lock until it has ended as well (a program that it starts does not, as
descriptors are closed then). So what is locked may be alive, and what is not locked is dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

PAUSE_SECONDS = 0.05


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock of a file, which is made if it is missing.

    Returns:
        The descriptor, to be closed; None if another one holds the lock.

    Raises:
        OSError: if the file can't be made, or its file system knows no locks.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if lock_descriptor(fd):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def lock_descriptor(fd: int, shared: bool = False) -> bool:
    """Lock an open file; False if another descriptor's lock is in the way."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_patiently(path: Path, seconds: float) -> int | None:
    """Repeat :func:`try_lock` until it succeeds or ``seconds`` have passed."""
    end = time.monotonic() + seconds
    while (fd := try_lock(path)) is None and time.monotonic() < end:
        time.sleep(PAUSE_SECONDS)
    return fd


@contextlib.contextmanager
def locked(path: Path, seconds: float = 0) -> Iterator[bool]:
    """Hold the lock of a file inside; yields whether it could be had within ``seconds``."""
    fd = lock_patiently(path, seconds)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)

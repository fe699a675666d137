"""A file in ``/dev/shm`` that the processes of one engine map, and nobody else.

One process creates it, and locks it before it has a name; the others open it by that name. All hold
a shared lock as long as they have it mapped. So a file whose lock is free has no process left: an
engine was killed before it could take the name away. The next engine that starts deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from pathlib import Path

from vllm_graft.errors import ConfigError, GraftError
from vllm_graft.hicache.config import flag
from vllm_graft.hicache.locks import lock_descriptor
from vllm_graft.log import logger

SHM = Path("/dev/shm")
PREFIX = "vllm_graft_region_"
UNNAMED = ".new"
"""What a name ends in until the file is whole, where files can't be made without a name."""

OPEN_SECONDS = 300.0
"""Longest that a process waits for the one that creates the region. Ranks come to this point
together, and if that one fails, vLLM ends the others before."""

_OURS = re.compile(rf"{PREFIX}[0-9a-f]{{32}}({re.escape(UNNAMED)})?")
_MODE = 0o600
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
"""What file systems and kernels without O_TMPFILE answer."""


def create(name: str, num_bytes: int) -> int:
    """Make the region, as the only process that does.

    Returns:
        A descriptor with a shared lock. Whoever maps it keeps the lock until it unmaps, as Python's
        ``mmap`` holds a copy of the descriptor.

    Raises:
        ConfigError: if ``/dev/shm`` has not that much room.
        GraftError: if there is a file of this name.
    """
    try:
        _require_room(num_bytes)
        directory = os.open(SHM, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return _create(directory, name, num_bytes)
        finally:
            os.close(directory)
    except FileExistsError:
        raise GraftError(
            f"{SHM / name} exists: another engine was started with the same VllmConfig. Make one "
            "for each engine."
        ) from None
    except OSError as error:
        raise GraftError(f"{SHM / name}, for the host KV cache, cannot be made: {error}.") from None


def attach(name: str, num_bytes: int, seconds: float = OPEN_SECONDS) -> int:
    """Open the region that another process creates.

    Returns:
        A descriptor with a shared lock, as :func:`create` does.

    Raises:
        GraftError: if it does not come within ``seconds``, or is not what it should be.
    """
    path = SHM / name
    end = time.monotonic() + seconds
    while True:
        try:
            # Not to hang where somebody has put a pipe.
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            break
        except FileNotFoundError:
            if time.monotonic() > end:
                raise _unusable(path, f"has not come within {seconds:.0f} s") from None
        except OSError as error:
            raise _unusable(path, f"cannot be opened: {error}") from None
        time.sleep(0.01)
    try:
        if problem := _problem(fd, num_bytes):
            raise _unusable(path, problem)
    except BaseException:
        os.close(fd)
        raise
    return fd


def remove(name: str, inode: int | None = None) -> None:
    """Take the name away, if the file ``inode`` has it; the memory goes with the last mapping."""
    with contextlib.suppress(FileNotFoundError):
        if inode is None or (SHM / name).lstat().st_ino == inode:
            (SHM / name).unlink()


def remove_orphans() -> int:
    """Delete regions that no process has mapped; returns how many.

    A region in use is never among them: its lock is held from before it has a name until the last
    process has unmapped it or ended. (A forked child that outlives an engine keeps the lock, so
    the file stays until it has ended too.)
    """
    removed = freed = 0
    for path in SHM.iterdir() if SHM.is_dir() else ():
        if _OURS.fullmatch(path.name):
            with contextlib.suppress(OSError):
                size = _remove_orphan(path)
                removed += size is not None
                freed += size or 0
    if removed:
        logger.info(
            "host KV cache: deleted %d region(s) with %d MiB in %s, of engines that were killed "
            "while they started.",
            removed,
            freed >> 20,
            SHM,
        )
    return removed


def _remove_orphan(path: Path) -> int | None:
    """Delete a file of ours that nobody has locked; returns the bytes that it took, or None."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        # The name may be another file's by now, if somebody else has deleted this one.
        if not ours or not lock_descriptor(fd) or path.lstat().st_ino != status.st_ino:
            return None
        path.unlink()
        return status.st_blocks * 512
    finally:
        os.close(fd)


def _require_room(num_bytes: int) -> None:
    free = os.statvfs(SHM)
    if free.f_bavail * free.f_frsize < num_bytes:
        raise ConfigError(
            f"{flag('host_bytes')}: {SHM} has {free.f_bavail * free.f_frsize} bytes free, "
            f"{num_bytes} are needed: raise its size (docker --shm-size), or lower "
            f"{flag('host_bytes')}."
        )


def _create(directory: int, name: str, num_bytes: int) -> int:
    fd = _unnamed(directory)
    source = f"/proc/self/fd/{fd}"
    if fd is None:
        source = name + UNNAMED
        fd = _new(directory, source)
    try:
        os.ftruncate(fd, num_bytes)
        os.link(source, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.close(fd)
        raise
    finally:
        if source.endswith(UNNAMED):
            os.unlink(source, dir_fd=directory)
    return fd


def _unnamed(directory: int) -> int | None:
    """A locked file without a name; None where there is no such thing."""
    try:
        fd = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, _MODE, dir_fd=directory)
    except OSError as error:
        if error.errno in _NO_TMPFILE:
            return None
        raise
    os.fchmod(fd, _MODE)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def _new(directory: int, name: str) -> int:
    """A new, locked file with a name."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(name, flags, _MODE, dir_fd=directory)
        os.fchmod(fd, _MODE)
        fcntl.flock(fd, fcntl.LOCK_SH)
        # Between the two another engine may have taken it for an orphan, and deleted it.
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _problem(fd: int, num_bytes: int) -> str | None:
    """Why an open file is not the region of this engine; locks it."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, and this process runs as {os.geteuid()}"
    if stat.S_IMODE(status.st_mode) != _MODE:
        return f"has mode {stat.S_IMODE(status.st_mode):o} instead of {_MODE:o}"
    if status.st_size != num_bytes:
        return f"has {status.st_size} bytes instead of {num_bytes}"
    # Whoever finds it unlocked deletes it: then the process that created it has ended.
    if not lock_descriptor(fd, shared=True) or not os.fstat(fd).st_nlink:
        return "was deleted: the process that created it has ended"
    return None


def _unusable(path: Path, problem: str) -> GraftError:
    return GraftError(
        f"{path}, the host memory that the first rank of this engine creates for all its "
        f"processes, {problem}. See the first rank's log, and start again."
    )

"""The shared region: a file in ``/dev/shm`` that only the processes of one engine map. One process
creates the file and locks it before it has a name. The others open it by that name. Every process
holds a shared lock while it has the file mapped. So if a file is not locked, its engine was killed
before it could remove the name. The next engine that starts deletes such files.

A region that several engines share keeps its name. Any process creates it, and the last one that
leaves deletes it.
"""

import atexit
import contextlib
import fcntl
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.base.locks import foreign, lock_descriptor
from vllm_graft.base.log import logger
from vllm_graft.hicache.config.cache_config import flag
from vllm_graft.hicache.config.nonce import REGION_PREFIX as PREFIX
from vllm_graft.hicache.host.machine_memory import unclaimed_bytes
from vllm_graft.hicache.host.shared_slots import HEAD_BYTES

SHM = Path("/dev/shm")
INCOMPLETE = ".new"
"""Suffix of a file's name until it has its size and its lock."""

OPEN_SECONDS = 300.0
"""Most seconds that a process waits for the region. If its creator fails, vLLM ends it earlier."""

_OURS = re.compile(rf"{PREFIX}[0-9a-f]{{32}}({re.escape(INCOMPLETE)})?")
_MODE = 0o600


def create(name: str, num_bytes: int, host_bytes: int = 0) -> int:
    """Create the region, in exactly one process of an engine, and return its descriptor.

    The descriptor has a shared lock, which a process that maps the file keeps until it unmaps it,
    because Python's ``mmap`` holds a copy of the descriptor.

    Raises:
        ConfigError: if ``/dev/shm`` has not enough room.
        GraftError: if there is a file of this name already, or it cannot be created.
        FileExistsError: if there is one, of :func:`join`, which gives ``host_bytes``.
    """
    try:
        _require_room(num_bytes)
        directory = os.open(SHM, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return _create(directory, name, num_bytes, host_bytes)
        finally:
            os.close(directory)
    except FileExistsError:
        if host_bytes:
            raise
        raise GraftError(
            f"{SHM / name} exists: another engine was started with the same VllmConfig. Make one "
            "for each engine."
        ) from None
    except OSError as error:
        raise GraftError(f"{SHM / name}, for the host KV cache, cannot be made: {error}.") from None


def attach(name: str, num_bytes: int, seconds: float = OPEN_SECONDS) -> int:
    """Open the region that another process creates, and wait for it; see :func:`create`. Raises
    `GraftError` if the region does not appear within ``seconds``, or is not this engine's."""
    path = SHM / name
    end = time.monotonic() + seconds
    while (fd := _open(path)) is None:
        if time.monotonic() > end:
            raise _unusable(path, f"has not come within {seconds:.0f} s")
        time.sleep(0.01)
    try:
        problem = _problem(fd, num_bytes)
        if problem is None and not _kept(fd):
            problem = "was deleted: the process that created it has ended"
        if problem:
            raise _unusable(path, problem)
    except BaseException:
        os.close(fd)
        raise
    return fd


def join(name: str, num_bytes: int, host_bytes: int, seconds: float = OPEN_SECONDS) -> int:
    """Open the region that several engines share, or create it if none does; see :func:`create`.
    Its head, the last bytes, begins with the pool's ``host_bytes``.

    Raises:
        ConfigError: if ``/dev/shm`` has not enough room, or the others have given other
            ``host_bytes``.
        GraftError: if a file of this name is not the region, or it is being made for too long.
    """
    path = SHM / name
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for left in (path, path.with_name(name + INCOMPLETE)):
            remove_unused(left)
        with contextlib.suppress(FileExistsError):
            fd = _open(path)
            if fd is None:
                return create(name, num_bytes, host_bytes)
            try:
                problem = _problem(fd)
                # Else it is being made or deleted.
                if problem or (_kept(fd) and os.fstat(fd).st_nlink == 1):
                    if not problem and (other := _head(fd)) != host_bytes:
                        raise ConfigError(
                            f"{flag('host_bytes')} is {host_bytes}, but the servers that share "
                            f"{path} have {other}: give the same, or end them first."
                        )
                    if problem := problem or _problem(fd, num_bytes):
                        raise _unshared(path, problem)
                    return os.dup(fd)
            finally:
                os.close(fd)
        time.sleep(0.01)
    raise _unshared(path, f"is being made by another process for {seconds:.0f} s, or has two names")


def leave(name: str, fd: int) -> None:
    """Give up a region that several engines share, when this process ends without closing it."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    remove_unused(SHM / name)


@cache
def remove_at_exit(prefix: str) -> None:
    """When this process ends, delete the regions whose names begin so if nobody has them any more.
    A frontend calls it, because vLLM may kill the processes that would have deleted theirs."""
    # Others have those that are there already, and this process may be no server at all.
    seconds = 0.5 if list(SHM.glob(f"{prefix}*")) else 5.0
    atexit.register(_remove_soon, prefix, seconds)


def _remove_soon(prefix: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while left := [path for path in SHM.glob(f"{prefix}*") if remove_unused(path) is None]:
        if time.monotonic() > end or not any(path.exists() for path in left):
            return
        time.sleep(0.05)


def pools(prefix: str) -> Iterator[int]:
    """The ``host_bytes`` of regions that engines share now, whose names begin with ``prefix``."""
    for path in SHM.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if _problem(fd) is None and not lock_descriptor(fd):
                    yield _head(fd)
            finally:
                os.close(fd)


def remove(name: str, inode: int | None = None) -> None:
    """Remove the region's name, of the file ``inode`` only if that is given. The memory is freed
    when the last process unmaps it."""
    with contextlib.suppress(FileNotFoundError):
        if inode is None or (SHM / name).lstat().st_ino == inode:
            (SHM / name).unlink()


def remove_orphans() -> int:
    """Delete regions that no process has mapped, and return their number. One in use is locked from
    before it has a name until the last process has unmapped it or ended, a forked child that
    outlives its engine included."""
    removed = freed = 0
    for path in SHM.iterdir() if SHM.is_dir() else ():
        if _OURS.fullmatch(path.name):
            size = remove_unused(path)
            removed += size is not None
            freed += size or 0
    if removed:
        logger.info(
            "host KV cache: deleted %d region(s) with %d MiB in %s, of engines that were killed.",
            removed,
            freed >> 20,
            SHM,
        )
    return removed


def remove_unused(path: Path) -> int | None:
    """Delete a region that no process has locked; return its bytes, or None if it was kept."""
    try:
        return _remove_unused(path)
    except OSError:
        return None


def _remove_unused(path: Path) -> int | None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        ours = stat.S_ISREG(status.st_mode) and not foreign(status)
        # If another process has deleted this file, its name may belong to a new one by now.
        if not ours or not lock_descriptor(fd) or path.lstat().st_ino != status.st_ino:
            return None
        path.unlink()
        return status.st_blocks * 512
    finally:
        os.close(fd)


def _require_room(num_bytes: int) -> None:
    room = unclaimed_bytes(SHM)
    if room < num_bytes:
        raise ConfigError(
            f"{flag('host_bytes')}: {SHM} has {max(0, room)} bytes that are free and that no file "
            f"there may still fill (vLLM's message queues), {num_bytes} are needed: raise its size "
            f"(docker --shm-size), or lower {flag('host_bytes')}."
        )


def _create(directory: int, name: str, num_bytes: int, host_bytes: int) -> int:
    source = name + INCOMPLETE
    fd = _new(directory, source)
    try:
        os.ftruncate(fd, num_bytes)
        if host_bytes:
            os.pwrite(fd, host_bytes.to_bytes(8, sys.byteorder), num_bytes - HEAD_BYTES)
        os.link(source, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.close(fd)
        raise
    finally:
        os.unlink(source, dir_fd=directory)
    return fd


def _new(directory: int, name: str) -> int:
    """Create and lock a file."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(name, flags, _MODE, dir_fd=directory)
        os.fchmod(fd, _MODE)
        fcntl.flock(fd, fcntl.LOCK_SH)
        # Between open and flock another engine may have deleted the file as an orphan.
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _open(path: Path) -> int | None:
    """Open a region; None if there is no such file."""
    try:
        # O_NONBLOCK: a pipe of this name would block the call forever.
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, f"cannot be opened: {error}") from None


def _problem(fd: int, num_bytes: int | None = None) -> str | None:
    """Why an open file cannot be a region of this user, of so many bytes; None if it can."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    if problem := foreign(status):
        return problem
    if stat.S_IMODE(status.st_mode) != _MODE:
        return f"has mode {stat.S_IMODE(status.st_mode):o} instead of {_MODE:o}"
    if num_bytes not in (None, status.st_size):
        return f"has {status.st_size} bytes instead of {num_bytes}"
    return None


def _kept(fd: int) -> bool:
    """Lock an open file, so that it is not deleted; False if it was, as unlocked ones are."""
    return lock_descriptor(fd, shared=True) and os.fstat(fd).st_nlink > 0


def _head(fd: int) -> int:
    """The ``host_bytes`` of a region that engines share; 0 of another file."""
    return int.from_bytes(os.pread(fd, 8, max(0, os.fstat(fd).st_size - HEAD_BYTES)), sys.byteorder)


def _unshared(path: Path, problem: str) -> GraftError:
    return GraftError(
        f"{path}, the host memory that servers share by {flag('shared')}, {problem}. End those "
        f"servers and remove the file, or set {flag('shared')} to false."
    )


def _unusable(path: Path, problem: str) -> GraftError:
    return GraftError(
        f"{path}, the host memory that the first rank of this engine creates for all its "
        f"processes, {problem}. See the first rank's log, and start again."
    )

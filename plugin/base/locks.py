"""Files and folders of this user, and ``flock`` locks on them that say that a process is alive.

Others may be able to write to the directory, so :func:`open_own` is the one way to open a file of
ours. A lock belongs to the open file: a child that was forked shares it and keeps it until it has
ended as well (a program that it starts does not). So what is locked may be alive, and what is not
locked is dead."""

import contextlib
import errno
import fcntl
import os
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PAUSE_SECONDS = 0.05

_LOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of Linux: type, whence, start, length, process (0)."""


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user, without following links and without waiting. Raises
    `OSError` if it can't be opened, is a link, a pipe or the like, has further names, or belongs to
    another user. The message says so. `path`: the file. It is made with mode 0600 if ``flags`` have
    ``O_CREAT`` and it is missing. `flags`: ``os.O_RDWR`` or the like, without ``O_TRUNC``, because
    the file is looked at first."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        fd = os.open(path, flags, 0o600)
    except PermissionError:
        if problem := foreign(path.lstat()):
            raise PermissionError(errno.EPERM, problem, str(path)) from None
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link, which is not followed", str(path)) from None
        raise
    status = os.fstat(fd)
    problem = foreign(status)
    if not stat.S_ISREG(status.st_mode):
        problem = "is no regular file"
    elif status.st_nlink > 1:
        problem = "has further names (hard links)"
    if problem is None:
        return fd
    os.close(fd)
    raise PermissionError(errno.EPERM, problem, str(path))


def foreign(status: os.stat_result) -> str | None:
    """How a file belongs to another user; None if it is this process's."""
    if status.st_uid == os.geteuid():
        return None
    return f"belongs to user {status.st_uid}, and this process runs as {os.geteuid()}"


def unusable_folder(path: Path) -> str | None:
    """What is wrong with a directory, or with its nearest existing parent; None if nothing."""
    for folder in (path, *path.parents):
        try:
            status = folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            if folder.is_symlink():
                return f"{folder} is a link that leads nowhere"
            continue
        except OSError as error:
            return f"{folder}: {error.strerror}"
        if not stat.S_ISDIR(status.st_mode):
            return f"{folder} is no directory"
        if not os.access(folder, os.W_OK | os.X_OK):
            owner = foreign(status)
            return f"{folder} may not be written to" + (f" ({owner})" if owner else "")
        return None if folder == path else _refuses_folders(folder)
    return None


def _refuses_folders(folder: Path) -> str | None:
    """Why no directory can be created in one that may be written to, as in ``/proc``; else None."""
    # It is tried only in file systems without blocks, as a try changes the directory's time.
    try:
        if os.statvfs(folder).f_blocks:
            return None
        with tempfile.TemporaryDirectory(prefix=".vllm-graft-", dir=folder):
            return None
    except OSError as error:
        return f"no directory can be created in {folder} ({error.strerror})"


def try_lock(path: Path) -> int | None:
    """A descriptor, to be closed, with the lock of a file, made if missing. None if another one
    holds the lock. Raises `OSError` as :func:`open_own`, or if its file system knows no locks."""
    fd = open_own(path, os.O_RDWR | os.O_CREAT)
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


class ByteLocks:
    """Locks on single bytes, of one opening of a file (``F_OFD_SETLK`` of Linux). Those of another
    opening stand in the way, in this process as well. The bytes need not exist. The kernel frees
    them when the last process that has this opening ends, whatever ends it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def take(self, byte: int, shared: bool = False) -> bool:
        """Lock a byte without waiting; False if another opening's lock stands in the way."""
        try:
            self._call(fcntl.F_OFD_SETLK, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, byte)
        except BlockingIOError:
            return False
        return True

    def free(self, byte: int) -> None:
        self._call(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def elsewhere(self, byte: int) -> bool:
        """Whether another opening has locked a byte."""
        return self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte) != fcntl.F_UNLCK

    def _call(self, order: int, kind: int, byte: int) -> int:
        given = _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        return int(_LOCK.unpack(fcntl.fcntl(self._fd, order, given))[0])

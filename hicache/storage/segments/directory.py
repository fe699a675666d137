"""The directories of a store: the root of all namespaces, and that of one namespace. One process at
a time has a namespace's directory open. Files of other users are refused one by one."""

import contextlib
import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.locks import foreign, lock_patiently, locked, unusable_folder
from vllm_graft.base.log import warning_once
from vllm_graft.hicache.config.connector_options import option_flag
from vllm_graft.hicache.storage.segments.neighbours import (
    LOCK_NAME,
    Held,
    Neighbours,
    bytes_of,
    claim_times,
    neighbours,
    segment_files,
    write_claim,
)
from vllm_graft.hicache.storage.segments.segment import segment_number

OPEN_SECONDS = 10.0
"""Most seconds that a store waits for the root's lock when it is opened."""
SHARE_SECONDS = 0.5
"""Most seconds that it waits for a lock later, while pages wait to be written and read."""


class Directory:
    """``<root>/<namespace in hex>``, made if missing, locked until :meth:`close`. Raises
    `ConfigError` if it cannot be created or written to, or another process has it open."""

    def __init__(self, root: Path, namespace: bytes) -> None:
        self.path = root / namespace.hex()
        self._seen: dict[str, int] = {}
        self._lock: int | None = None
        try:
            _warn_of_others(root)
            self._open(OPEN_SECONDS)
        except OSError as error:
            raise ConfigError(
                f"{option_flag('storage', 'path')}: {str(root)!r} cannot be used: {error}. Give a "
                "directory on a local disk that the engine may write to."
            ) from error
        if self._lock is None:
            raise ConfigError(
                f"{option_flag('storage', 'path')}: another process has {str(self.path)!r} open. "
                "Give each engine its own path."
            )

    def _open(self, seconds: float) -> None:
        make_folder(self.path)
        with self.root_locked(seconds):
            # Other processes lock a namespace for a moment, to see whether it is open. So the
            # lock is tried several times.
            self._lock = lock_patiently(self.path / LOCK_NAME, SHARE_SECONDS)
            if self._lock is not None:
                os.ftruncate(self._lock, 0)
                os.utime(self._lock)
                with contextlib.suppress(OSError):
                    # Without a claim only the existing bytes count. On a full disk the write
                    # fails, but pages can still be read.
                    self.claim(Held(0, 0))

    def removed(self) -> bool:
        """Whether somebody has removed the directory, or put another one in its place."""
        if self._lock is None:
            return True
        try:
            return not os.path.samestat(os.fstat(self._lock), (self.path / LOCK_NAME).lstat())
        except OSError:
            return True

    def renew(self) -> bool:
        """Make the directory anew and lock it; False if another process has it, or it can't be."""
        self.close()
        try:
            self._open(SHARE_SECONDS)
        except OSError:
            return False
        return self._lock is not None

    def root_locked(
        self, seconds: float = SHARE_SECONDS
    ) -> contextlib.AbstractContextManager[bool]:
        """Hold the root's lock, under which claims are made; it yields whether it was acquired."""
        return locked(self.path.parent / LOCK_NAME, seconds)

    def neighbours(self) -> Neighbours:
        """The other namespaces below the root. Call it under the root's lock."""
        self._seen = claim_times(self.path)
        return neighbours(self.path)

    def neighbours_changed(self) -> bool:
        """Whether a neighbour was opened or wrote a claim since the last :meth:`neighbours`."""
        return claim_times(self.path) != self._seen

    def claim(self, held: Held) -> None:
        """Publish this namespace's claim and wish. Call it under the root's lock."""
        if self._lock is not None:
            write_claim(self._lock, held)

    def bytes_besides(self, numbers: Collection[int]) -> int:
        """Bytes of other segments: unreadable, of a foreign format, or not to be deleted."""
        files = segment_files(self.path)
        return bytes_of([file for file in files if segment_number(file) not in numbers])

    def delete_files(self) -> bool:
        """Delete all segment files of this namespace, even unknown ones; False if one remains."""
        try:
            for file in segment_files(self.path):
                file.unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self._lock is not None:
            fd, self._lock = self._lock, None
            os.close(fd)


def require_folder(path: Path, max_bytes: int) -> None:
    """Refuse a root, which may be missing, that a store could not use. It leaves nothing behind.
    Raises `ConfigError` if it cannot be created or written to, its lock file is another user's, or
    its file system is smaller than ``max_bytes``."""
    if problem := unusable_folder(path):
        raise ConfigError(
            f"{option_flag('storage', 'path')}: {str(path)!r} cannot be used: {problem}. Give a "
            "directory that the engine may write to."
        )
    if problem := _lock_problem(path / LOCK_NAME):
        raise ConfigError(
            f"{option_flag('storage', 'path')}: {path / LOCK_NAME} {problem}. Give each user's "
            "servers a directory of their own, or delete what is in this one."
        )
    _warn_of_others(path)
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    status = os.statvfs(there)
    if max_bytes > (size := status.f_blocks * status.f_frsize) > 0:
        raise ConfigError(
            f"{option_flag('storage', 'max_bytes')} is {max_bytes}, but the file system of "
            f"{str(there)!r} has {size} bytes: lower it."
        )


def make_folder(path: Path) -> None:
    """Make a directory, and those above it, for this user alone. An existing one is narrowed."""
    for folder in reversed((path, *path.parents)):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is no directory", str(path))
    if problem := foreign(status):
        raise PermissionError(errno.EPERM, problem, str(path))
    if status.st_mode & 0o077:
        path.chmod(0o700)


def _warn_of_others(path: Path) -> None:
    """Say so once if others than this user and root can change what is in an existing directory."""
    try:
        status = path.stat()
    except OSError:
        return
    problem = foreign(status) if status.st_uid else None
    if status.st_mode & 0o022:
        problem = f"may be written to by others (mode {stat.S_IMODE(status.st_mode):o})"
    if problem:
        warning_once(
            f"{option_flag('storage', 'path')}: {str(path)!r} {problem}: they can remove "
            "pages. Give one that belongs to the server's user and that no other may write to."
        )


def _lock_problem(lock: Path) -> str | None:
    try:
        status = lock.lstat()
    except OSError:
        return None
    problem = foreign(status)
    if not stat.S_ISREG(status.st_mode):
        problem = "is no regular file"
    return problem

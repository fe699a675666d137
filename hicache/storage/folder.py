"""Directories of stores: a check whether one can be used, and how one is made."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.locks import foreign
from vllm_graft.base.log import warning_once
from vllm_graft.hicache.config.connector_options import option_flag


def require_folder(path: Path, max_bytes: int, lock_name: str) -> None:
    """Refuse a directory that a store could not use. It leaves nothing behind.

    Args:
        path: the directory, which may be missing.
        max_bytes: bytes that the store may take.
        lock_name: name of the lock file in the directory.

    Raises:
        ConfigError: if it cannot be created or written to, its lock file is another user's, or its
            file system is smaller than the store.
    """
    if problem := _problem(path):
        raise ConfigError(
            f"{option_flag('storage', 'path')}: {str(path)!r} cannot be used: {problem}. Give a "
            "directory that the engine may write to."
        )
    if problem := _lock_problem(path / lock_name):
        raise ConfigError(
            f"{option_flag('storage', 'path')}: {path / lock_name} {problem}. Give each user's "
            "servers a directory of their own, or delete what is in this one."
        )
    warn_of_others(path)
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    status = os.statvfs(there)
    if max_bytes > (size := status.f_blocks * status.f_frsize) > 0:
        raise ConfigError(
            f"{option_flag('storage', 'max_bytes')} is {max_bytes}, but the file system of "
            f"{str(there)!r} has {size} bytes: lower it."
        )


def make_folder(path: Path) -> None:
    """Make a directory, and those above it, for this user alone. An existing one is narrowed.

    Raises:
        OSError: if that is impossible, or it is a link or belongs to another user.
    """
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


def warn_of_others(path: Path) -> None:
    """Say so once if others than this user and root can change what is in an existing directory.

    Files of others in it are refused one by one. So others can remove pages, but not forge them.
    """
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
    """Why a lock file can't be this user's; None if it can, or is missing."""
    try:
        status = lock.lstat()
    except OSError:
        return None
    problem = foreign(status)
    if not stat.S_ISREG(status.st_mode):
        problem = "is no regular file"
    return problem


def _problem(path: Path) -> str | None:
    """What is wrong with the directory, or with its nearest existing parent; None if nothing."""
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
    """Why no directory can be created in one that may be written to, as in ``/proc``; else None.

    It is tried only in file systems without blocks, which most such ones are, as a try changes the
    directory's time.
    """
    try:
        if os.statvfs(folder).f_blocks:
            return None
        with tempfile.TemporaryDirectory(prefix=".vllm-graft-", dir=folder):
            return None
    except OSError as error:
        return f"no directory can be created in {folder} ({error.strerror})"

"""A namespace's directory: one process at a time, and what other namespaces left beside it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.log import logger
from vllm_graft.hicache.config.connector_options import option_flag
from vllm_graft.hicache.storage.segments.segment import segment_number

LOCK_NAME = "LOCK"
LOCK_TRIES = 10
LOCK_PAUSE_SECONDS = 0.05
_NAMESPACE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Sibling:
    """Another namespace's directory that no process has open.

    Attributes:
        path: the directory.
        bytes: of its segments, when it was looked at.
        opened: when a process last opened it, in seconds since the epoch.
    """

    path: Path
    bytes: int
    opened: float


class Directory:
    """``<root>/<namespace in hex>``, locked until :meth:`close` or the end of the process.

    Args:
        root: what the configuration calls ``path``; it is made if it is missing.
        namespace: 16 bytes.

    Raises:
        ConfigError: if it can't be made, written to, or is open elsewhere.
    """

    def __init__(self, root: Path, namespace: bytes) -> None:
        self.path = root / namespace.hex()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock_patiently(self.path)
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
        with contextlib.suppress(OSError):
            os.utime(self._lock)
            os.pwrite(self._lock, b"%-20d\n" % os.getpid(), 0)

    def siblings(self) -> list[Sibling]:
        """Other namespaces below the same root that nobody has open, longest unused first."""
        found = []
        for path in self.path.parent.iterdir():
            if path != self.path and _NAMESPACE.fullmatch(path.name) and path.is_dir():
                with contextlib.suppress(OSError), _locked(path) as locked:
                    if locked:
                        size = sum(file.stat().st_size for file in _segment_files(path))
                        found.append(Sibling(path, size, (path / LOCK_NAME).stat().st_mtime))
        return sorted((one for one in found if one.bytes), key=lambda one: one.opened)

    def delete_files(self) -> bool:
        """Delete every segment file of this namespace, known or not; False if one remains."""
        return _delete_files(self.path)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            fd, self._lock = self._lock, None
            os.close(fd)


def delete_sibling(sibling: Sibling) -> bool:
    """Delete a sibling's segments, unless a process has opened it since; False if any remain."""
    with contextlib.suppress(OSError), _locked(sibling.path) as locked:
        if locked:
            # The directory and its lock stay: another process may be waiting to lock this file.
            logger.info("Deleting KV of namespace %s to make room.", sibling.path.name)
            return _delete_files(sibling.path)
    return False


def holders(root: Path) -> dict[bytes, int]:
    """Namespaces below a root that a process has open, and its id. Leaves nothing behind."""
    found = {}
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            if _NAMESPACE.fullmatch(path.name) and (pid := _holder(path)) is not None:
                found[bytes.fromhex(path.name)] = pid
    return found


def _holder(path: Path) -> int | None:
    """The process that holds a directory's lock; None if none does, or if it can't be told."""
    try:
        fd = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Shared: others that look do not hide it, and who wants to hold it tries again.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            return int(os.pread(fd, 32, 0))
    finally:
        os.close(fd)
    return None


def _segment_files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if segment_number(file) is not None]


def _delete_files(path: Path) -> bool:
    try:
        # Data before indexes: see Segment.unlink.
        for file in sorted(_segment_files(path), key=lambda file: file.suffix):
            file.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _lock(path: Path) -> int | None:
    """A descriptor that holds the directory's lock; None if another one does."""
    fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock_patiently(path: Path) -> int | None:
    """As :func:`_lock`; another store may hold the lock for a moment, to look at its size."""
    for _ in range(LOCK_TRIES):
        if (fd := _lock(path)) is not None:
            return fd
        time.sleep(LOCK_PAUSE_SECONDS)
    return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the directory's lock inside; yields whether it could be had."""
    fd = _lock(path)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)

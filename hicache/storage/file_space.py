"""The byte limit of a ``file`` store's root, which namespaces and processes share.

A process claims bytes before it writes pages. To make a claim, it lists all files and deletes the
oldest, so it claims a larger part of ``max_bytes`` at a time. It writes the claim into a file that
it keeps locked. So a process that holds the root's lock knows the bytes of all files and all
claims. Together they never exceed ``max_bytes``, even if processes die.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_graft.base.locks import locked, try_lock

SUFFIX = ".page"
TEMPORARY = ".tmp"
TEMPORARY_SECONDS = 3600
"""Age in seconds at which a temporary file counts as abandoned by a writer that has died."""

PARTS = 64
"""A process claims 1/64 of ``max_bytes`` at a time. So much may stay unused per process."""
LOCK_SECONDS = 10.0
"""Most seconds that a write waits for another process that lists the files."""
FULL_SECONDS = 1.0
"""Seconds for which a full store declines pages before it looks for room again."""

_CLAIMS = ".claims"
_LOCK = "LOCK"
_NAMESPACE = re.compile(r"[0-9a-f]{32}")


class _File(NamedTuple):
    written: int
    path: Path
    bytes: int


class FileSpace:
    """The bytes that this process may write below a root.

    Args:
        root: directory that holds a directory for each namespace.
        max_bytes: most bytes of all files there.
        deleted: called with the files, of any namespace, that were deleted to make room.

    Raises:
        OSError: if the root cannot be written to, or its file system does not support locks.
    """

    def __init__(self, root: Path, max_bytes: int, deleted: Callable[[list[Path]], None]) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._deleted = deleted
        self._lock = threading.Lock()
        self._left = 0
        self._writing = 0
        self._full_until = 0.0
        (root / _CLAIMS).mkdir(exist_ok=True)
        self._path = root / _CLAIMS / f"{os.getpid()}-{secrets.token_hex(4)}"
        with locked(root / _LOCK, LOCK_SECONDS) as alone:
            if not alone:
                # Without the root's lock, another process could take the new claim for a dead one.
                raise TimeoutError(f"another process holds {root / _LOCK}")
            self._fd = try_lock(self._path)
        with contextlib.suppress(OSError):
            # Delete files if an earlier process had a larger limit. This may fail on a full disk,
            # from which pages can still be read.
            self._claim(0, 0)

    @contextlib.contextmanager
    def room(self, size: int) -> Iterator[bool]:
        """Reserve room for a file of ``size`` bytes, which is written within the context.

        Yields:
            Whether there is room.

        Raises:
            OSError: if the medium fails.
        """
        with self._lock:
            granted = self._left >= size or self._ask(size)
            if granted:
                self._left -= size
                self._writing += size
        try:
            yield granted
        finally:
            if granted:
                with self._lock:
                    self._writing -= size

    def close(self) -> None:
        """Give back the claimed bytes. After that there is no room."""
        with self._lock:
            self._left = 0
            if self._fd is not None:
                fd, self._fd = self._fd, None
                self._path.unlink(missing_ok=True)
                os.close(fd)

    def _ask(self, size: int) -> bool:
        """Claim a part of ``max_bytes``, at least ``size`` bytes.

        If there is no room, later calls return False for a while without looking again.
        """
        if time.monotonic() < self._full_until:
            return False
        if self._claim(size, max(size, self._max_bytes // PARTS)):
            return True
        self._full_until = time.monotonic() + FULL_SECONDS
        return False

    def _claim(self, least: int, wanted: int) -> bool:
        with locked(self._root / _LOCK, LOCK_SECONDS) as alone:
            room = self._max_bytes - self._other_claims() - self._writing
            wanted = wanted if wanted <= room else least
            if not alone or wanted > room:
                return False
            if self._fd is None or not self._delete_down_to(room - wanted):
                return False
            # All claims have one length, so that a full disk accepts an overwritten claim.
            os.pwrite(self._fd, f"{self._writing + wanted:020}\n".encode(), 0)
        self._left = wanted
        return True

    def _other_claims(self) -> int:
        """Bytes that other processes may still write. Claims of dead processes are deleted."""
        claimed = 0
        for path in (self._root / _CLAIMS).iterdir():
            if path == self._path:
                continue
            with contextlib.suppress(OSError, ValueError), locked(path) as dead:
                if dead:
                    path.unlink(missing_ok=True)
                else:
                    claimed += int(path.read_text())
        return claimed

    def _delete_down_to(self, limit: int) -> bool:
        """Delete the oldest files until all together have at most ``limit`` bytes.

        Returns:
            False if not enough files could be deleted.
        """
        files = list(_files(self._root))
        total = sum(file.bytes for file in files)
        if total <= limit:
            return True
        gone = []
        for file in sorted(files):
            if total <= limit:
                break
            if file.path.suffix == SUFFIX or _is_abandoned(file):
                with contextlib.suppress(OSError):
                    file.path.unlink(missing_ok=True)
                    total -= file.bytes
                    gone.append(file.path)
        self._deleted(gone)
        return total <= limit


def _files(root: Path) -> Iterator[_File]:
    """Yield all files of pages and all temporary files. Some may vanish meanwhile."""
    for space in _entries(root):
        if _NAMESPACE.fullmatch(space.name) and space.is_dir():
            for folder in _entries(space.path):
                for entry in _entries(folder.path) if folder.is_dir() else ():
                    if entry.name.endswith((SUFFIX, TEMPORARY)):
                        with contextlib.suppress(OSError):
                            status = entry.stat(follow_symlinks=False)
                            path = Path(entry.path)
                            yield _File(status.st_mtime_ns, path, status.st_size)


def _entries(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:
        return []


def _is_abandoned(file: _File) -> bool:
    return time.time() - file.written / 1e9 > TEMPORARY_SECONDS

"""The bytes below the root of a ``file`` store, which namespaces and processes share.

A process that writes pages has claimed the bytes for them before: a part of ``max_bytes`` at a
time, as all files are listed for it, and the oldest deleted. The claim stands in a file that the
process has locked. So under the root's lock, the bytes of all files and of all claims are known.
They never come to more than ``max_bytes``, whoever writes, and whoever dies.
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

from vllm_graft.hicache.locks import locked, try_lock

SUFFIX = ".page"
TEMPORARY = ".tmp"
TEMPORARY_SECONDS = 3600
"""Age at which a temporary file is one that its writer did not live to rename."""

PARTS = 64
"""A process claims 1 of so many parts of ``max_bytes`` at a time: a part each may stay unused."""
LOCK_SECONDS = 10.0
"""Longest that a write waits for another process that lists the files."""
FULL_SECONDS = 1.0
"""How long a store that has no room declines pages before it looks again."""

_CLAIMS = ".claims"
_LOCK = "LOCK"
_NAMESPACE = re.compile(r"[0-9a-f]{32}")


class _File(NamedTuple):
    written: int
    path: Path
    bytes: int


class FileSpace:
    """What this process may write below a root.

    Args:
        root: holds a directory for each namespace.
        max_bytes: of all files there.
        deleted: is told which files were deleted to make room, of any namespace.

    Raises:
        OSError: if the root can't be written to, or its file system knows no locks.
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
                # Made without it, the claim could be taken for a dead process's.
                raise TimeoutError(f"another process holds {root / _LOCK}")
            self._fd = try_lock(self._path)
        with contextlib.suppress(OSError):
            # What an earlier process was allowed may be more. A full disk can be read.
            self._claim(0, 0)

    @contextlib.contextmanager
    def room(self, size: int) -> Iterator[bool]:
        """Room for a file of ``size`` bytes, to be written inside; yields whether there is any.

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
        """Give back what was claimed; then there is room for nothing."""
        with self._lock:
            self._left = 0
            if self._fd is not None:
                fd, self._fd = self._fd, None
                self._path.unlink(missing_ok=True)
                os.close(fd)

    def _ask(self, size: int) -> bool:
        """Claim a part, at least ``size`` bytes; not asked again for a while if refused."""
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
            # Of one length, so that a disk that is full takes it where it took the first.
            os.pwrite(self._fd, f"{self._writing + wanted:020}\n".encode(), 0)
        self._left = wanted
        return True

    def _other_claims(self) -> int:
        """Bytes that other processes may still write; claims of dead ones are deleted."""
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
        """Delete the oldest files until all come to ``limit`` bytes; False if they still do not."""
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
    """All files of pages, and temporary ones; some may go meanwhile."""
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

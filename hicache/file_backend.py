"""The ``file`` store: one checked file a page."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from vllm_graft.errors import ConfigError
from vllm_graft.hicache.file_space import SUFFIX, TEMPORARY, TEMPORARY_SECONDS, FileSpace
from vllm_graft.hicache.files import Files
from vllm_graft.hicache.folder import require_folder
from vllm_graft.hicache.options import Bytes, Folder, Options, option_flag, parse
from vllm_graft.hicache.record import HEADER_BYTES, as_bytes, encode_header, storable, verify
from vllm_graft.hicache.storage import PageKey, ReadStatus, StorageBackend


class FileOptions(Options):
    """Keys beside ``"backend": "file"``."""

    path: Folder
    """Directory; each namespace has a directory in it. Processes may share it."""

    max_bytes: Annotated[Bytes, Field(ge=0)]
    """Bytes that all pages in the directory may take; the page written first leaves first, whoever
    wrote it."""


class FileBackend(StorageBackend):
    """A file a page, renamed into place when it is whole, with the header of a segment's record.

    For small caches and shared directories: each page costs a few system calls and an inode. A
    process sees the pages that were there when it opened the store, and its own.

    Args:
        namespace: 16 bytes; names the directory and stands in every file.
        options: see :class:`FileOptions`.
        files: the system calls; the fault injector puts itself here.
    """

    def __init__(
        self, namespace: bytes, options: Mapping[str, Any], files: Files | None = None
    ) -> None:
        super().__init__(namespace, options)
        self.options = parse(FileOptions, options, "storage")
        self.files = files if files is not None else Files()
        self._lock = threading.Lock()
        self._lengths: dict[PageKey, int] = {}
        self._bytes = 0
        self._unsynced: set[Path] = set()
        self._numbers = itertools.count()
        self._generation = 0
        self._closed = False
        self._root = self.options.path / namespace.hex()
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            if not os.access(self._root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "no right to write")
            self._scan()
            self._space = FileSpace(
                self.options.path, int(self.options.max_bytes), self._deleted_for_room
            )
        except OSError as error:
            raise ConfigError(
                f"{option_flag('storage', 'path')}: {str(self.options.path)!r} cannot be used: "
                f"{error}. Give a directory that the engine may write to."
            ) from error

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Refuse wrong options, and a directory that can't be made or written to."""
        require_folder(parse(FileOptions, options, "storage").path)

    @classmethod
    def too_small(cls, options: Mapping[str, Any], page_bytes: int) -> str | None:
        """Why the cap holds no page."""
        given = parse(FileOptions, options, "storage")
        needed = page_bytes + HEADER_BYTES
        if needed <= given.max_bytes:
            return None
        return (
            f"{option_flag('storage', 'max_bytes')} is {int(given.max_bytes)}, but a page of KV "
            f"takes {needed} bytes: give at least {needed}."
        )

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Whether each key is in the index."""
        return [key in self._lengths for key in keys]

    def read(self, key: PageKey, buffer: memoryview) -> ReadStatus:
        """Fill ``buffer`` with the page of ``key``, checked after it was read."""
        buffer = as_bytes(buffer)
        if self._closed or key not in self._lengths:
            self.counters.add("read_misses")
            return ReadStatus.MISS
        generation = self._generation
        status = self._read(key, buffer)
        if self._generation != generation:
            status = ReadStatus.MISS
        if status is ReadStatus.HIT:
            self.counters.add("read_hits")
            self.counters.add("read_bytes", buffer.nbytes)
        else:
            names = {ReadStatus.CORRUPT: "read_corrupt", ReadStatus.ERROR: "read_errors"}
            self.counters.add(names.get(status, "read_misses"))
            self._forget(key, delete=status is ReadStatus.CORRUPT)
        return status

    def write(self, key: PageKey, page: memoryview) -> bool:
        """Write a page to a new file and rename it, unless it is there."""
        page = as_bytes(page)
        size = page.nbytes + HEADER_BYTES
        if self._closed:
            return self._decline("closed")
        if not storable(key) or size > self.options.max_bytes:
            return self._decline("too_large")
        if self._lengths.get(key) == page.nbytes:
            self.counters.add("writes_present")
            return True
        generation = self._generation
        path = self._path(key)
        try:
            with self._space.room(size) as granted:
                self.full = not granted
                if not granted:
                    return self._decline("full")
                self._write(path, key, page)
        except OSError:
            self.counters.add("write_errors")
            return self._decline("error")
        with self._lock:
            # What comes after clear() must not see what was before.
            if self._generation != generation:
                self._unlink([key])
                return self._decline("dropped")
            self._keep(key, page.nbytes)
            self._unsynced.add(path)
        self.counters.add("writes")
        self.counters.add("write_bytes", page.nbytes)
        return True

    def remove(self, key: PageKey) -> None:
        """Delete a page's file."""
        if self._forget(key, delete=True):
            self.counters.add("removed")

    def flush(self) -> bool:
        """Make every file durable that was written before the call."""
        with self._lock:
            paths, self._unsynced = self._unsynced, set()
        done = True
        for path in paths:
            done &= self._sync(path)
        return done

    def clear(self) -> bool:
        """Delete all files of the namespace."""
        with self._lock:
            self._generation += 1
            self._lengths.clear()
            self._unsynced.clear()
            self._bytes = 0
            try:
                for path in self._root.glob(f"*/*{SUFFIX}"):
                    path.unlink(missing_ok=True)
            except OSError:
                self.counters.add("clear_errors")
                return False
        return True

    def close(self) -> None:
        """Flush; later calls miss or decline."""
        if not self._closed:
            self._closed = True
            self.flush()
            self._space.close()

    def stats(self) -> dict[str, int]:
        """Counters, and ``pages`` and ``bytes``."""
        with self._lock:
            gauges = {"pages": len(self._lengths), "bytes": self._bytes}
        return self.counters.snapshot() | gauges

    def _path(self, key: PageKey) -> Path:
        name = key.hash.hex()
        return self._root / name[:2] / f"{name}-{key.pool}{SUFFIX}"

    def _scan(self) -> None:
        """Index what is there; delete temporary files that were left behind."""
        for path in self._root.glob("*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if (key := _key(path)) is not None:
                    self._keep(key, status.st_size - HEADER_BYTES)
                elif time.time() - status.st_mtime > TEMPORARY_SECONDS:
                    path.unlink()

    def _keep(self, key: PageKey, length: int) -> None:
        self._bytes += length + HEADER_BYTES - self._size(key)
        self._lengths[key] = length

    def _size(self, key: PageKey) -> int:
        length = self._lengths.get(key)
        return 0 if length is None else length + HEADER_BYTES

    def _deleted_for_room(self, paths: Sequence[Path]) -> None:
        """Forget pages that were the oldest of all; of others' pages, these find out themselves."""
        self.counters.add("evicted_pages", len(paths))
        with self._lock:
            for path in paths:
                if path.parent.parent == self._root and (key := _key(path)) is not None:
                    self._bytes -= self._size(key)
                    self._lengths.pop(key, None)

    def _forget(self, key: PageKey, delete: bool) -> bool:
        with self._lock:
            self._bytes -= self._size(key)
            known = self._lengths.pop(key, None) is not None
        if known and delete:
            self._unlink([key])
        return known

    def _unlink(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            with contextlib.suppress(OSError):
                self._path(key).unlink(missing_ok=True)

    def _read(self, key: PageKey, buffer: memoryview) -> ReadStatus:
        header = bytearray(HEADER_BYTES)
        try:
            with self._opened(self._path(key), os.O_RDONLY) as fd:
                done = self.files.read(fd, [header, buffer], 0)
                size = os.fstat(fd).st_size
        except FileNotFoundError:
            return ReadStatus.MISS
        except OSError:
            return ReadStatus.ERROR
        whole = done == size == HEADER_BYTES + buffer.nbytes
        good = whole and verify(header, buffer, self.namespace, key)
        return ReadStatus.HIT if good else ReadStatus.CORRUPT

    def _write(self, path: Path, key: PageKey, page: memoryview) -> None:
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}-{next(self._numbers)}{TEMPORARY}")
        header = encode_header(self.namespace, key, page)
        try:
            fd = self.files.create(temporary)
            try:
                self.files.write(fd, [header, page], 0)
            finally:
                os.close(fd)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def _sync(self, path: Path) -> bool:
        try:
            with self._opened(path, os.O_RDWR) as fd:
                self.files.fdatasync(fd)
            self.files.sync_directory(path.parent)
        except FileNotFoundError:
            return True
        except OSError:
            self.counters.add("sync_errors")
            return False
        return True

    @contextlib.contextmanager
    def _opened(self, path: Path, flags: int) -> Iterator[int]:
        fd = os.open(path, flags | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


def _key(path: Path) -> PageKey | None:
    """The key of the page in a file; None for another file."""
    name, _, pool = path.stem.partition("-")
    if path.suffix != SUFFIX or not pool.isdecimal():
        return None
    try:
        return PageKey(bytes.fromhex(name), int(pool))
    except ValueError:
        return None

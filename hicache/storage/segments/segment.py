"""A segment: a data file that only grows, and its index file."""

import contextlib
import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from vllm_graft.base.log import logger
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus
from vllm_graft.hicache.storage.files import Files
from vllm_graft.hicache.storage.segments.format import (
    DATA_MAGIC,
    ENTRY_BYTES,
    FILE_HEADER_BYTES,
    HEADER_BYTES,
    INDEX_MAGIC,
    Entry,
    encode_entry,
    encode_header,
    file_header,
    verify,
)

DATA_SUFFIX = ".data"
INDEX_SUFFIX = ".index"
_NUMBER = re.compile(r"[0-7][0-9a-f]{15}")
"""A segment's number in a file's name. The first digit keeps the next one within 64 bits."""

OVERHEAD_BYTES = HEADER_BYTES + 2 * ENTRY_BYTES
"""Most bytes per page beside its own: a header, its entry, and the entry of its removal."""


def bytes_alone(length: int) -> int:
    """Most bytes of a segment that holds nothing but one page of ``length`` bytes."""
    return length + OVERHEAD_BYTES + 2 * FILE_HEADER_BYTES


class Segment:
    """An open segment.

    The store's lock guards every attribute. :meth:`read`, :meth:`write_at` and :meth:`commit` do
    I/O, so threads call them without the lock, after they were counted in ``users``.

    Attributes:
        number: newer segments have larger ones.
        size: offset of the next record in the data file.
        index_size: valid bytes of the index file.
        users: number of threads that read from or write to the data file now.
        dropped: whether the segment was deleted or the store closed: no page may be returned.
        tick: value of the store's counter at the last use.
        keys: keys of its records. The current page of a key may be in another segment.
        pending: entries of written records that are not yet in the index file.
        committing: number of entries that are being written to the index file.
        writing: number of records that have reserved room, but no entry yet.
    """

    def __init__(self, directory: Path, number: int, fd: int, namespace: bytes) -> None:
        self.number = number
        self.size = FILE_HEADER_BYTES
        self.index_size = FILE_HEADER_BYTES
        self.users = 0
        self.dropped = False
        self.tick = 0
        self.keys: set[PageKey] = set()
        self.pending: list[Entry] = []
        self.committing = 0
        self.writing = 0
        self._namespace = namespace
        self._index_path = index_path(directory, number)
        self._fd: int | None = fd

    @classmethod
    def create(cls, files: Files, directory: Path, number: int, namespace: bytes) -> Self:
        """Create an empty segment with durable names; if it fails, no file is left."""
        data, index = data_path(directory, number), index_path(directory, number)
        fd = files.create(data)
        try:
            files.write(fd, [file_header(DATA_MAGIC, number, namespace)], 0)
            index_fd = files.create(index)
            try:
                files.write(index_fd, [file_header(INDEX_MAGIC, number, namespace)], 0)
            finally:
                os.close(index_fd)
            files.sync_directory(directory)
        except BaseException:
            os.close(fd)
            for path in (data, index):
                with contextlib.suppress(OSError):
                    path.unlink()
            raise
        return cls(directory, number, fd, namespace)

    @property
    def bytes(self) -> int:
        """Bytes on the medium, including pending index entries."""
        return self.size + self.index_size + ENTRY_BYTES * (len(self.pending) + self.committing)

    @property
    def most_bytes(self) -> int:
        """Most bytes without new records: an entry of each record, and of each page's removal."""
        return self.bytes + ENTRY_BYTES * (len(self.keys) + 2 * self.writing)

    def read(self, files: Files, entry: Entry, buffer: memoryview) -> ReadStatus:
        """Read a record's page into ``buffer``, which has the page's length, and check it."""
        header = bytearray(HEADER_BYTES)
        try:
            done = files.read(self._file(), [header, buffer], entry.offset)
        except OSError:
            return ReadStatus.ERROR
        whole = done == HEADER_BYTES + buffer.nbytes
        good = whole and verify(header, buffer, self._namespace, entry.key)
        return ReadStatus.HIT if good else ReadStatus.CORRUPT

    def write_at(self, files: Files, offset: int, key: PageKey, page: memoryview) -> None:
        header = encode_header(self._namespace, key, page)
        files.write(self._file(), [header, page], offset)

    def commit(self, files: Files, entries: Iterable[Entry]) -> None:
        """Make the records of ``entries`` durable, and after that their index entries. Raises
        `DataLostError` if the records can't be, and `OSError` if only the index can't."""
        self._sync_data(files)
        content = b"".join(map(encode_entry, entries))
        try:
            fd = files.open(self._index_path)
        except FileNotFoundError as error:
            raise DataLostError(error.errno, "somebody deleted the index file") from error
        try:
            files.write(fd, [content], self.index_size)
            files.fdatasync(fd)
        finally:
            os.close(fd)
        self.index_size += len(content)

    def _sync_data(self, files: Files) -> None:
        try:
            files.fdatasync(self._file())
            linked = os.fstat(self._file()).st_nlink > 0
        except OSError as error:
            raise DataLostError(error.errno, error.strerror) from error
        if not linked:
            raise DataLostError(errno.ENOENT, "somebody deleted the data file")

    def shorten(self, size: int) -> None:
        """Cut the data file at ``size`` after a failed write."""
        self.size = size
        # An error does not matter, because the next write overwrites the remains.
        with contextlib.suppress(OSError):
            os.truncate(self._file(), size)

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):
                os.close(fd)

    def _file(self) -> int:
        if self._fd is None:
            raise OSError("the segment is closed")
        return self._fd


class DataLostError(OSError):
    """The system could not make written records durable, so the segment has to be dropped. The
    kernel may have marked the memory pages clean, so that a second fdatasync would succeed although
    the data is lost ("fsyncgate", LWN 752063)."""


def data_path(directory: Path, number: int) -> Path:
    """The data file of segment ``number``."""
    return directory / f"{number:016x}{DATA_SUFFIX}"


def index_path(directory: Path, number: int) -> Path:
    """The index file of segment ``number``."""
    return directory / f"{number:016x}{INDEX_SUFFIX}"


def segment_number(path: Path) -> int | None:
    """The number of the segment that a file belongs to; None if it belongs to none."""
    ours = path.suffix in (DATA_SUFFIX, INDEX_SUFFIX) and _NUMBER.fullmatch(path.stem)
    return int(path.stem, 16) if ours else None


def segment_numbers(directory: Path) -> list[int]:
    """The numbers of the segments with a file in ``directory``, the oldest first."""
    numbers = set()
    for path in directory.iterdir():
        number = segment_number(path)
        if number is not None:
            numbers.add(number)
        elif path.suffix in (DATA_SUFFIX, INDEX_SUFFIX):
            logger.warning("%s is no file of the KV store, and is left alone.", path)
    return sorted(numbers)


def unlink_segment(directory: Path, number: int) -> bool:
    """Delete both files of segment ``number``; False if the medium refused."""
    try:
        # The data file goes first: recovery removes an index that remains, but would scan data.
        data_path(directory, number).unlink(missing_ok=True)
        index_path(directory, number).unlink(missing_ok=True)
    except OSError:
        return False
    return True

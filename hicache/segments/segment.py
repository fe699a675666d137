"""One segment: a data file that only grows, and the index file beside it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path

from vllm_graft.hicache.files import Files
from vllm_graft.hicache.record import HEADER_BYTES, encode_header, verify
from vllm_graft.hicache.segments.format import (
    DATA_MAGIC,
    ENTRY_BYTES,
    FILE_HEADER_BYTES,
    INDEX_MAGIC,
    Entry,
    encode_entry,
    file_header,
)
from vllm_graft.hicache.storage import PageKey, ReadStatus
from vllm_graft.log import logger

DATA_SUFFIX = ".data"
INDEX_SUFFIX = ".index"
_NUMBER = re.compile(r"[0-7][0-9a-f]{15}")
"""A segment's number in a file's name; the next one has to fit into 64 bits."""

OVERHEAD_BYTES = HEADER_BYTES + 2 * ENTRY_BYTES
"""Bytes that a page takes beside its own, at most: a header, an entry, and that of its removal."""


class Segment:
    """An open segment.

    The store's lock guards every attribute; :meth:`read`, :meth:`write_at` and :meth:`commit` do
    I/O and are called without it, by users that were counted in.

    Attributes:
        number: rises with age.
        size: where the next record goes in the data file.
        index_size: bytes of the index file that are valid.
        users: threads that read from or write to the data file now.
        dropped: whether it was deleted or the store closed; nothing of it may be served.
        tick: when it was last read from, on the store's counter.
        keys: of the records in it; the page of a key may be elsewhere by now.
        pending: entries whose records are written, and are not in the index file yet.
        committing: entries that are being written to the index file.
        writing: records that have their room, and no entry yet.
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
        self._directory = directory
        self._index_path = index_path(directory, number)
        self._fd: int | None = fd

    @classmethod
    def create(cls, files: Files, directory: Path, number: int, namespace: bytes) -> Segment:
        """Make an empty segment, whose two names are durable.

        Raises:
            OSError: and leaves no file behind, if the medium lets us delete it.
        """
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
        """Bytes on the medium, those of pending index entries included."""
        return self.size + self.index_size + ENTRY_BYTES * (len(self.pending) + self.committing)

    @property
    def most_bytes(self) -> int:
        """Bytes that it comes to when what is being written has its entries, and when each page is
        removed, which takes an entry too."""
        return self.bytes + ENTRY_BYTES * (len(self.keys) + 2 * self.writing)

    def read(self, files: Files, entry: Entry, buffer: memoryview) -> ReadStatus:
        """Read the record into ``buffer`` (bytes of the page's length) and check it."""
        header = bytearray(HEADER_BYTES)
        try:
            done = files.read(self._file(), [header, buffer], entry.offset)
        except OSError:
            return ReadStatus.ERROR
        whole = done == HEADER_BYTES + buffer.nbytes
        good = whole and verify(header, buffer, self._namespace, entry.key)
        return ReadStatus.HIT if good else ReadStatus.CORRUPT

    def write_at(self, files: Files, offset: int, key: PageKey, page: memoryview) -> None:
        """Write a record; raises OSError."""
        header = encode_header(self._namespace, key, page)
        files.write(self._file(), [header, page], offset)

    def commit(self, files: Files, entries: Iterable[Entry]) -> None:
        """Make the records of ``entries`` durable, and only then their index entries.

        Raises:
            OSError: a :class:`DataLostError` if the records can't be made durable; any other if
                only the index could not be written.
        """
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
        """Cut what a failed write left behind ``size``; the next write overwrites it anyway."""
        self.size = size
        with contextlib.suppress(OSError):
            os.truncate(self._file(), size)

    def unlink(self) -> bool:
        """Delete both files; False if the medium refused. The data is read no more after it."""
        return unlink_segment(self._directory, self.number)

    def close(self) -> None:
        """Close the data file; when no user is left."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):
                os.close(fd)

    def _file(self) -> int:
        if self._fd is None:
            raise OSError("the segment is closed")
        return self._fd


class DataLostError(OSError):
    """Records were handed to the system, which could not make them durable.

    The kernel may have marked the pages clean, so that a second fdatasync would succeed for nothing
    ("fsyncgate", LWN 752063): the segment has to go.
    """


def data_path(directory: Path, number: int) -> Path:
    """The data file of segment ``number``."""
    return directory / f"{number:016x}{DATA_SUFFIX}"


def index_path(directory: Path, number: int) -> Path:
    """The index file of segment ``number``."""
    return directory / f"{number:016x}{INDEX_SUFFIX}"


def segment_number(path: Path) -> int | None:
    """The number of the segment that a file is of; None for a file that is not of ours."""
    ours = path.suffix in (DATA_SUFFIX, INDEX_SUFFIX) and _NUMBER.fullmatch(path.stem)
    return int(path.stem, 16) if ours else None


def segment_numbers(directory: Path) -> list[int]:
    """Numbers of the segments of which there is a file, oldest first."""
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
        # The data first: an index alone is removed by recovery, data alone would be scanned.
        data_path(directory, number).unlink(missing_ok=True)
        index_path(directory, number).unlink(missing_ok=True)
    except OSError:
        return False
    return True

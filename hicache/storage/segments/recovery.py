"""Recovery of a segment that an earlier process left behind in any state. Records with an entry in
the index file were durable before the entry was written, and are checked when they are read.
Records after the last of them may be incomplete. Each of these is read, and kept if its checksum
agrees. At the first one that does not agree, the data file is cut."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.files import Files
from vllm_graft.hicache.storage.segments.format import (
    DATA_MAGIC,
    ENTRY_BYTES,
    FILE_HEADER_BYTES,
    HEADER_BYTES,
    INDEX_MAGIC,
    Entry,
    HeaderCheck,
    check_file_header,
    decode_entries,
    decode_header,
    file_header,
    header_state,
)
from vllm_graft.hicache.storage.segments.segment import Segment, data_path, index_path

_CHUNK_BYTES = 1 << 20


@dataclass
class Recovered:
    """The result of recovering a segment, None if nothing of it is usable. Then its files have to
    be deleted, unless ``foreign``: its format is newer than this code. `salvaged` pages had no
    entry in the index file, and `cut_bytes` were cut off the end of the data file."""

    segment: Segment | None = None
    entries: dict[PageKey, Entry] = field(default_factory=dict)
    foreign: bool = False
    salvaged: int = 0
    cut_bytes: int = 0


def recover(files: Files, directory: Path, number: int, namespace: bytes) -> Recovered:
    """Open segment ``number``, cut its incomplete end, and write the missing index entries. Raises
    `OSError` if the medium fails. A missing file is no failure."""
    try:
        fd = files.open(data_path(directory, number))
    except FileNotFoundError:
        return Recovered()
    try:
        check = _check(files, fd, DATA_MAGIC, number, namespace)
        if check is not HeaderCheck.OURS:
            os.close(fd)
            return Recovered(foreign=check is HeaderCheck.FOREIGN)
        segment = Segment(directory, number, fd, namespace)
        size = os.fstat(fd).st_size
        found = Recovered(segment, _indexed(files, directory, namespace, segment, size))
        _salvage_tail(files, fd, namespace, segment, found)
        if segment.pending:
            segment.commit(files, segment.pending)
            segment.pending = []
    except BaseException:
        os.close(fd)
        raise
    return found


def _check(files: Files, fd: int, magic: bytes, number: int, namespace: bytes) -> HeaderCheck:
    header = bytearray(FILE_HEADER_BYTES)
    done = files.read(fd, [header], 0)
    return check_file_header(bytes(header[:done]), magic, number, namespace)


def _indexed(
    files: Files, directory: Path, namespace: bytes, segment: Segment, size: int
) -> dict[PageKey, Entry]:
    """The entries of the index file, before the first torn one, whose records exist."""
    fd = files.open(index_path(directory, segment.number), make=True)
    try:
        if _check(files, fd, INDEX_MAGIC, segment.number, namespace) is not HeaderCheck.OURS:
            # The index is rebuilt by scanning the data file.
            os.truncate(fd, 0)
            files.write(fd, [file_header(INDEX_MAGIC, segment.number, namespace)], 0)
        content = bytearray(max(0, os.fstat(fd).st_size - FILE_HEADER_BYTES))
        content = content[: files.read(fd, [content], FILE_HEADER_BYTES)]
        entries = decode_entries(bytes(content))
        segment.index_size = FILE_HEADER_BYTES + ENTRY_BYTES * len(entries)
        os.truncate(fd, segment.index_size)
    finally:
        os.close(fd)
    found: dict[PageKey, Entry] = {}
    for entry in entries:
        if entry.removed:
            found.pop(entry.key, None)
        elif entry.offset >= FILE_HEADER_BYTES and entry.end <= size:
            found[entry.key] = entry
            segment.size = max(segment.size, entry.end)
    return found


def _salvage_tail(
    files: Files, fd: int, namespace: bytes, segment: Segment, found: Recovered
) -> None:
    """Keep complete records after the last indexed one, and cut the rest of the file."""
    size = os.fstat(fd).st_size
    while (entry := _record_at(files, fd, segment.size, size, namespace)) is not None:
        found.entries[entry.key] = entry
        found.salvaged += 1
        segment.pending.append(entry)
        segment.size = entry.end
    if size > segment.size:
        found.cut_bytes = size - segment.size
        os.truncate(fd, segment.size)


def _record_at(files: Files, fd: int, offset: int, size: int, namespace: bytes) -> Entry | None:
    """The entry of the record at ``offset``; None if the record is incomplete or wrong."""
    raw = bytearray(HEADER_BYTES)
    if files.read(fd, [raw], offset) != HEADER_BYTES:
        return None
    header = decode_header(raw)
    if header is None or header.namespace != namespace:
        return None
    entry = Entry(header.key, offset, header.length)
    if entry.end > size:
        return None
    state = header_state(raw)
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(1, header.length))))
    position = offset + HEADER_BYTES
    while position < entry.end:
        part = buffer[: min(len(buffer), entry.end - position)]
        if files.read(fd, [part], position) != part.nbytes:
            return None
        state.update(part)
        position += part.nbytes
    return entry if state.digest() == header.digest else None

"""The bytes of a segment's two files, apart from its records.

Both begin with a header: magic, version, the segment's number, the namespace, a checksum. In the
data file records follow (``hicache.storage.record``). In the index file entries follow, each with a
checksum of its own, and an entry is written only after the record that it names is durable.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import xxhash

from vllm_graft.hicache.pages.page_key import FORMAT, PageKey
from vllm_graft.hicache.storage.record import HEADER_BYTES

FILE_HEADER_BYTES = 64
"""Length of the header of either file."""

ENTRY_BYTES = 96
"""Length of an index entry."""

DATA_MAGIC = b"GRKVDATA"
INDEX_MAGIC = b"GRKVINDX"

_FILE = struct.Struct("<8sI4xQ16s16x")
_ENTRY = struct.Struct("<BBH4xQQ64s")
_CHECK = struct.Struct("<Q")
_PUT, _REMOVED = 1, 2


class HeaderCheck(enum.Enum):
    """What a file's header turned out to be."""

    OURS = "ours"
    BROKEN = "broken"
    """Cut, changed, of another namespace or another segment."""
    FOREIGN = "foreign"
    """Of a format version that this code does not know: not ours to read or to delete."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the index: where a record lies, or that it was removed.

    Attributes:
        key: which page.
        offset: of the record's header in the data file; 0 if removed.
        length: bytes of the page; 0 if removed.
    """

    key: PageKey
    offset: int
    length: int

    @property
    def removed(self) -> bool:
        """Whether the page was removed (no record begins at 0: the file's header is there)."""
        return self.offset == 0

    @property
    def end(self) -> int:
        """First byte behind the record."""
        return self.offset + HEADER_BYTES + self.length


def file_header(magic: bytes, number: int, namespace: bytes) -> bytes:
    """The header of segment ``number``'s file with this magic."""
    fields = _FILE.pack(magic, FORMAT, number, namespace)
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def check_file_header(header: bytes, magic: bytes, number: int, namespace: bytes) -> HeaderCheck:
    """What ``header``, the file's first bytes, is to the reader of this segment."""
    if header == file_header(magic, number, namespace):
        return HeaderCheck.OURS
    if len(header) == FILE_HEADER_BYTES:
        found, version, *_ = _FILE.unpack_from(header)
        if found == magic and version > FORMAT and _is_whole(header):
            return HeaderCheck.FOREIGN
    return HeaderCheck.BROKEN


def encode_entry(entry: Entry) -> bytes:
    """An index entry's bytes."""
    key = entry.key
    kind = _REMOVED if entry.removed else _PUT
    fields = _ENTRY.pack(kind, len(key.hash), key.pool, entry.offset, entry.length, key.hash)
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def decode_entries(content: bytes) -> list[Entry]:
    """The entries in ``content`` up to the first that is cut or changed."""
    entries = []
    for start in range(0, len(content) - ENTRY_BYTES + 1, ENTRY_BYTES):
        raw = content[start : start + ENTRY_BYTES]
        if not _is_whole(raw):
            break
        kind, hash_length, pool, offset, length, padded = _ENTRY.unpack_from(raw)
        if kind not in (_PUT, _REMOVED):
            break
        entries.append(Entry(PageKey(padded[:hash_length], pool), offset, length))
    return entries


def _is_whole(raw: bytes) -> bool:
    (check,) = _CHECK.unpack_from(raw, len(raw) - _CHECK.size)
    return bool(check == xxhash.xxh3_64_intdigest(raw[: -_CHECK.size]))

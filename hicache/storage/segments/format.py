"""The format of a segment's two files, apart from the records in the data file.

Both files begin with a header: magic, version, the segment's number, the namespace, and a checksum.
In the data file records follow (``hicache.storage.record``). In the index file entries follow, each
with its own checksum. An entry is written only after its record is durable.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import xxhash

from vllm_graft.hicache.pages.page_key import FORMAT, PageKey
from vllm_graft.hicache.storage.record import HEADER_BYTES

FILE_HEADER_BYTES = 64
"""Length of the header of each file."""

ENTRY_BYTES = 96
"""Length of an index entry."""

DATA_MAGIC = b"GRKVDATA"
INDEX_MAGIC = b"GRKVINDX"

_FILE = struct.Struct("<8sI4xQ16s16x")
_ENTRY = struct.Struct("<BBH4xQQ64s")
_CHECK = struct.Struct("<Q")
_PUT, _REMOVED = 1, 2


class HeaderCheck(enum.Enum):
    """The result of checking a file's header."""

    OURS = "ours"
    """The header is that of this segment."""
    BROKEN = "broken"
    """The header is cut or changed, or belongs to another namespace or segment."""
    FOREIGN = "foreign"
    """The format's version is newer than this code. The file must be neither read nor deleted."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the index: the place of a record, or the note that a page was removed.

    Attributes:
        key: key of the page.
        offset: offset of the record's header in the data file; 0 if the page was removed.
        length: bytes of the page; 0 if it was removed.
    """

    key: PageKey
    offset: int
    length: int

    @property
    def removed(self) -> bool:
        """Whether the page was removed. No record has offset 0, where the file's header is."""
        return self.offset == 0

    @property
    def end(self) -> int:
        """Offset of the first byte after the record."""
        return self.offset + HEADER_BYTES + self.length


def file_header(magic: bytes, number: int, namespace: bytes) -> bytes:
    """The header of the file of segment ``number`` that has this magic."""
    fields = _FILE.pack(magic, FORMAT, number, namespace)
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def check_file_header(header: bytes, magic: bytes, number: int, namespace: bytes) -> HeaderCheck:
    """Check whether ``header``, the first bytes of a file, belongs to this segment."""
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
    """The entries in ``content`` before the first one that is cut or changed."""
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

"""The formats of a segment's two files. All numbers are little-endian, texts padded with zeros.

Both files begin with a header: magic, version, the segment's number, the namespace, and a checksum.
The index file goes on with entries, each with its own checksum; an entry is written only after its
record is durable. The data file goes on with records, a header and the bytes of a page::

    0    4s   magic "GRKV"
    4    u16  format version
    6    u16  pool
    8    u8   length of the hash, then 7 zero bytes
    16   u64  length of the page in bytes
    24   16s  namespace
    40   64s  hash
    104  u64  xxh3-64 of bytes 0..103, which says whether the header is intact
    112  16s  xxh3-128 of bytes 0..111 and the page

A page is right if every field is what the reader expects and the last checksum agrees. So the
reader detects a record in the wrong place, for other weights, or changed anywhere."""

import enum
import struct
from dataclasses import dataclass

import xxhash

from vllm_graft.hicache.pages.page_key import FORMAT, MAX_HASH_BYTES, MAX_POOL, PageKey

HEADER_BYTES = 128
"""Length of a record's header."""

FILE_HEADER_BYTES = 64
"""Length of the header of each file."""

ENTRY_BYTES = 96
"""Length of an index entry."""

DATA_MAGIC = b"GRKVDATA"
INDEX_MAGIC = b"GRKVINDX"

_MAGIC = b"GRKV"
_RECORD = struct.Struct("<4sHHB7xQ16s64s")
_FILE = struct.Struct("<8sI4xQ16s16x")
_ENTRY = struct.Struct("<BBH4xQQ64s")
_CHECK = struct.Struct("<Q")
_SIGNED = _RECORD.size + _CHECK.size
_PUT, _REMOVED = 1, 2


@dataclass(frozen=True)
class RecordHeader:
    """The content of a record's header whose own checksum agrees. ``length`` counts the page's
    bytes; ``digest`` is the expected checksum of header and page."""

    key: PageKey
    namespace: bytes
    length: int
    digest: bytes


def storable(key: PageKey) -> bool:
    """Whether the format can express ``key``."""
    return 0 < len(key.hash) <= MAX_HASH_BYTES and 0 <= key.pool <= MAX_POOL


def encode_header(namespace: bytes, key: PageKey, page: memoryview) -> bytes:
    """The record header of a contiguous page, with a key for which :func:`storable` is True."""
    signed = _checked(
        _RECORD.pack(_MAGIC, FORMAT, key.pool, len(key.hash), page.nbytes, namespace, key.hash)
    )
    return signed + page_digest(signed, page)


def decode_header(header: bytes | bytearray) -> RecordHeader | None:
    """The content of ``header``; None if it is no header of this format, or was changed."""
    if len(header) != HEADER_BYTES or not _is_whole(header[:_SIGNED]):
        return None
    magic, version, pool, hash_length, length, namespace, padded = _RECORD.unpack_from(header)
    if magic != _MAGIC or version != FORMAT:
        return None
    key = PageKey(padded[:hash_length], pool)
    return RecordHeader(key, namespace, length, bytes(header[_SIGNED:]))


def verify(header: bytes | bytearray, page: memoryview, namespace: bytes, key: PageKey) -> bool:
    """Whether ``header`` and ``page`` are those that were written for ``key`` in ``namespace``."""
    found = decode_header(header)
    if found is None or (found.namespace, found.key) != (namespace, key):
        return False
    return found.length == page.nbytes and found.digest == page_digest(header, page)


def page_digest(header: bytes | bytearray, page: memoryview) -> bytes:
    """xxh3-128 of the header's signed part and the page."""
    state = header_state(header)
    state.update(page)
    return state.digest()


def header_state(header: bytes | bytearray) -> xxhash.xxh3_128:
    """A hash object that has processed the header's signed part. The page comes next."""
    return xxhash.xxh3_128(bytes(header[:_SIGNED]))


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
    """An entry of the index: the place of a record, or the note that a page was removed. ``offset``
    is that of the record's header in the data file, ``length`` counts the page's bytes; both are 0
    if the page was removed."""

    key: PageKey
    offset: int
    length: int

    @property
    def removed(self) -> bool:
        """Whether the page was removed. No record has offset 0, where the file's header is."""
        return self.offset == 0

    @property
    def end(self) -> int:
        return self.offset + HEADER_BYTES + self.length


def file_header(magic: bytes, number: int, namespace: bytes) -> bytes:
    """The header of the file of segment ``number`` that has this magic."""
    return _checked(_FILE.pack(magic, FORMAT, number, namespace))


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
    return _checked(
        _ENTRY.pack(kind, len(key.hash), key.pool, entry.offset, entry.length, key.hash)
    )


def decode_entries(content: bytes) -> list[Entry]:
    """The entries in ``content`` before the first one that is cut or changed."""
    entries = []
    for start in range(0, len(content) - ENTRY_BYTES + 1, ENTRY_BYTES):
        raw = content[start : start + ENTRY_BYTES]
        kind, hash_length, pool, offset, length, padded = _ENTRY.unpack_from(raw)
        if not _is_whole(raw) or kind not in (_PUT, _REMOVED):
            break
        entries.append(Entry(PageKey(padded[:hash_length], pool), offset, length))
    return entries


def _checked(fields: bytes) -> bytes:
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def _is_whole(raw: bytes | bytearray) -> bool:
    (check,) = _CHECK.unpack_from(raw, len(raw) - _CHECK.size)
    return bool(check == xxhash.xxh3_64_intdigest(bytes(raw[: -_CHECK.size])))

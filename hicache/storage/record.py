"""A page on a medium: a header that says all about it, then its bytes.

::

    0    4s   magic "GRKV"
    4    u16  format version
    6    u16  pool
    8    u8   length of the hash, then 7 zero bytes
    16   u64  length of the page in bytes
    24   16s  namespace
    40   64s  hash, padded with zero bytes
    104  u64  xxh3-64 of bytes 0..103: whether the header may be believed
    112  16s  xxh3-128 of bytes 0..111 and the page

All little-endian. A page is right if every field is what the reader asked for and the last checksum
agrees; so a record that stands in the wrong place, was written for other weights, or was changed
anywhere is found out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from vllm_graft.hicache.pages.page_key import FORMAT, MAX_HASH_BYTES, MAX_POOL, PageKey

HEADER_BYTES = 128
"""Length of a record's header."""

DIGEST_BYTES = 16
"""Length of a record's checksum."""

_MAGIC = b"GRKV"
_FIELDS = struct.Struct("<4sHHB7xQ16s64s")
_CHECK = struct.Struct("<Q")
_SIGNED = _FIELDS.size + _CHECK.size


@dataclass(frozen=True)
class RecordHeader:
    """What a header says, after its own checksum was compared.

    Attributes:
        key: which page.
        namespace: of which model.
        length: bytes of the page.
        digest: what the checksum of header and page has to be.
    """

    key: PageKey
    namespace: bytes
    length: int
    digest: bytes


def storable(key: PageKey) -> bool:
    """Whether the format can express ``key``."""
    return 0 < len(key.hash) <= MAX_HASH_BYTES and 0 <= key.pool <= MAX_POOL


def encode_header(namespace: bytes, key: PageKey, page: memoryview) -> bytes:
    """The header of ``page`` (bytes, contiguous), for a :func:`storable` key."""
    fields = _FIELDS.pack(_MAGIC, FORMAT, key.pool, len(key.hash), page.nbytes, namespace, key.hash)
    signed = fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))
    return signed + page_digest(signed, page)


def decode_header(header: bytes | bytearray) -> RecordHeader | None:
    """What ``header`` says; None if it is no header of this format, or was changed."""
    if len(header) != HEADER_BYTES:
        return None
    fields = bytes(header[: _FIELDS.size])
    (check,) = _CHECK.unpack_from(header, _FIELDS.size)
    magic, version, pool, hash_length, length, namespace, padded = _FIELDS.unpack(fields)
    if magic != _MAGIC or version != FORMAT or check != xxhash.xxh3_64_intdigest(fields):
        return None
    key = PageKey(padded[:hash_length], pool)
    return RecordHeader(key, namespace, length, bytes(header[_SIGNED:]))


def verify(header: bytes | bytearray, page: memoryview, namespace: bytes, key: PageKey) -> bool:
    """Whether ``header`` and ``page`` are what was written for ``key`` in ``namespace``."""
    found = decode_header(header)
    if found is None or (found.namespace, found.key) != (namespace, key):
        return False
    return found.length == page.nbytes and found.digest == page_digest(header[:_SIGNED], page)


def page_digest(signed: bytes | bytearray, page: memoryview) -> bytes:
    """xxh3-128 of the header's signed part and the page."""
    state = header_state(signed)
    state.update(page)
    return state.digest()


def header_state(header: bytes | bytearray) -> xxhash.xxh3_128:
    """A hash that has taken in the header's signed part and waits for the page."""
    state = xxhash.xxh3_128()
    state.update(bytes(header[:_SIGNED]))
    return state


def as_bytes(view: memoryview) -> memoryview:
    """``view`` as one dimension of bytes; it has to be contiguous."""
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")

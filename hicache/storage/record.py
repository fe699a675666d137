"""The record of a page on a medium: a header that describes the page, then the page's bytes.

::

    0    4s   magic "GRKV"
    4    u16  format version
    6    u16  pool
    8    u8   length of the hash, then 7 zero bytes
    16   u64  length of the page in bytes
    24   16s  namespace
    40   64s  hash, padded with zero bytes
    104  u64  xxh3-64 of bytes 0..103, which says whether the header is intact
    112  16s  xxh3-128 of bytes 0..111 and the page

All numbers are little-endian. A page is right if every field is what the reader expects and the
last checksum agrees. So the reader detects a record in the wrong place, a record for other weights,
and a record that was changed anywhere.
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
    """The content of a header whose own checksum agrees.

    Attributes:
        key: key of the page.
        namespace: namespace of the page.
        length: bytes of the page.
        digest: expected checksum of header and page.
    """

    key: PageKey
    namespace: bytes
    length: int
    digest: bytes


def storable(key: PageKey) -> bool:
    """Whether the format can express ``key``."""
    return 0 < len(key.hash) <= MAX_HASH_BYTES and 0 <= key.pool <= MAX_POOL


def encode_header(namespace: bytes, key: PageKey, page: memoryview) -> bytes:
    """The header of a page.

    Args:
        namespace: namespace of the page.
        key: key of the page, for which :func:`storable` is True.
        page: the page's bytes, contiguous.
    """
    fields = _FIELDS.pack(_MAGIC, FORMAT, key.pool, len(key.hash), page.nbytes, namespace, key.hash)
    signed = fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))
    return signed + page_digest(signed, page)


def decode_header(header: bytes | bytearray) -> RecordHeader | None:
    """The content of ``header``; None if it is no header of this format, or was changed."""
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
    """Whether ``header`` and ``page`` are those that were written for ``key`` in ``namespace``."""
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
    """A hash object that has processed the header's signed part. The page comes next."""
    state = xxhash.xxh3_128()
    state.update(bytes(header[:_SIGNED]))
    return state


def as_bytes(view: memoryview) -> memoryview:
    """A contiguous ``view`` as one dimension of bytes."""
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")

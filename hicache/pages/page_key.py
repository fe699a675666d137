"""The key of a page, and the limits of its fields."""

import hashlib
from typing import NamedTuple

NAMESPACE_BYTES = 16
"""Length of a namespace: see :mod:`vllm_graft.hicache.pages.namespace`."""

MAX_HASH_BYTES = 64
"""Longest block hash that a store has to take, in bytes. A sha256 has 32."""

MAX_POOL = 2**16 - 1
"""Largest pool number that a store has to take."""

SALT_BYTES = 16
"""Length of a salt: see :func:`salted`."""

FORMAT = 1
"""Version of stores' records, the only one that is written or read; part of each namespace."""


class PageKey(NamedTuple):
    """Names a page within a namespace. It is a tuple, as thousands are looked up within one step.
    `hash`: the block's hash as vLLM computed it, 1 to :data:`MAX_HASH_BYTES` bytes. It covers the
    tokens of the whole prefix; the weights are in the namespace, or in a salt. `pool`: number of
    the pool (KV cache group) that the page belongs to, 0 to :data:`MAX_POOL`."""

    hash: bytes
    pool: int


def salted(block_hash: bytes, salt: bytes) -> bytes:
    """The hash of a page that only those find who know the salt, of up to 64 bytes. A namespace
    says what an engine has started with. Its pages get a random salt once that is no longer true,
    because weights were replaced or may have been; until then the salt is empty."""
    if not salt:
        return block_hash
    return hashlib.blake2b(block_hash, digest_size=32, key=salt).digest()

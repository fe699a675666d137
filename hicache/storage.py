"""What a store of pages below host memory has to do.

A page is the KV of one block in one pool (a KV cache group's bytes on this rank, in the host's
layout). A store holds pages of one namespace, by key; it may forget any page at any time, and it
never gives bytes that it was not given. Whoever serves a page checks it first: see
:meth:`StorageBackend.read`.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

NAMESPACE_BYTES = 16
"""Length of a namespace: see ``vllm_graft.hicache.namespace``."""

MAX_HASH_BYTES = 64
"""Longest block hash that a store has to take (sha256 has 32)."""

MAX_POOL = 2**16 - 1
"""Largest pool number that a store has to take."""


class PageKey(NamedTuple):
    """Which page. A tuple, as prefixes of thousands of keys are looked up within a step.

    Attributes:
        hash: the block's hash as vLLM computed it, 1 to :data:`MAX_HASH_BYTES` bytes. It covers
            the tokens of the whole prefix, not the weights: those are in the namespace.
        pool: number of the pool (KV cache group) whose bytes these are, 0 to :data:`MAX_POOL`.
    """

    hash: bytes
    pool: int


class ReadStatus(enum.Enum):
    """What became of a read. Only after HIT may the buffer be used."""

    HIT = "hit"
    """The whole buffer holds the page, and its checksum was compared after it was read."""

    MISS = "miss"
    """The store does not have the page (any more)."""

    CORRUPT = "corrupt"
    """Bytes, length, key or namespace differ from what was written. The key is forgotten."""

    ERROR = "error"
    """The medium failed. The key is forgotten."""


class StorageBackend(ABC):
    """A store of pages of one namespace.

    All methods may be called from several threads at once, and none but the constructor raises
    for a failing medium: a store that has failed declines writes and misses reads.

    Args:
        namespace: :data:`NAMESPACE_BYTES` bytes; pages of another namespace are never seen.
        options: what the configuration gives the backend, without the key ``backend``.

    Raises:
        ConfigError: if an option is unknown or wrong, or the medium cannot be opened. Asked for
            and not active is an error.
    """

    def __init__(self, namespace: bytes, options: Mapping[str, Any]) -> None:
        if len(namespace) != NAMESPACE_BYTES:
            raise ValueError(f"a namespace has {NAMESPACE_BYTES} bytes, got {len(namespace)}")
        self.full = False
        """Whether there is no room for more pages now, as other processes have claimed it."""
        self.namespace = bytes(namespace)
        self.counters = Counters()

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Refuse, before a model loads, options with which the store could not be opened.

        The frontend calls it, and vLLM's other processes may: several times, also while a store
        with these options is open. It must not leave anything behind, nor wait. By default it does
        nothing, and the constructor refuses what is wrong, late.

        Args:
            options: as for the constructor.

        Raises:
            ConfigError: says which option is wrong, and what to do.
        """
        return

    @classmethod
    def open_elsewhere(cls, options: Mapping[str, Any]) -> Mapping[bytes, int]:
        """Namespaces that a process has open and nobody else can open, with the process's id.

        Called where :meth:`check` is, and after it; under the same conditions.
        """
        return {}

    @classmethod
    def too_small(cls, options: Mapping[str, Any], page_bytes: int) -> str | None:
        """Why not even one page would be kept; asked before a store is opened.

        Args:
            options: as the constructor gets them.
            page_bytes: of the largest page: a prefix needs those of all pools.

        Returns:
            A sentence with the flag, its value, and the least that it has to be; None if pages fit.

        Raises:
            ConfigError: if an option is unknown or wrong.
        """
        return None

    @abstractmethod
    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Whether each key is in the index. No I/O; a True may still miss when read."""

    @abstractmethod
    def read(self, key: PageKey, buffer: memoryview) -> ReadStatus:
        """Fill ``buffer`` with the page of ``key``.

        Args:
            key: which page.
            buffer: writable, contiguous; its number of bytes is the page's expected length, and a
                page of another length is CORRUPT. Its content is undefined unless HIT returns.
        """

    @abstractmethod
    def write(self, key: PageKey, page: memoryview) -> bool:
        """Keep a page. ``page`` is contiguous and may be reused when the call returns.

        Returns:
            True if the page is (already) kept: it can be read at once by this process; whether it
            outlives the process is settled by :meth:`flush`. False if it was declined (full,
            closed, too large, or the medium failed), which is counted.
        """

    @abstractmethod
    def remove(self, key: PageKey) -> None:
        """Forget a page, if it is there."""

    @abstractmethod
    def flush(self) -> bool:
        """Make what was written before the call durable; False if the medium refused."""

    @abstractmethod
    def clear(self) -> bool:
        """Forget every page of the namespace, on the medium too.

        Returns:
            True if nothing is left to be read, also after a restart; False if the medium refused
            to delete (this process serves none of it all the same).
        """

    @abstractmethod
    def close(self) -> None:
        """Flush and release the medium. A second call does nothing; later calls miss or decline."""

    def stats(self) -> dict[str, int]:
        """Counters since the store was opened, and gauges (``pages``, ``bytes``)."""
        return self.counters.snapshot()

    def _decline(self, reason: str) -> bool:
        """What :meth:`write` returns for a page that it does not keep; counted by reason."""
        self.counters.add(f"declined_{reason}")
        return False


class Counters:
    """Named integers that several threads add to."""

    def __init__(self) -> None:
        self._values: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` to the counter ``name``."""
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counters that were ever added to."""
        with self._lock:
            return dict(self._values)

"""The interface of stores, which keep pages below host memory. A page is the KV of one block in one
pool: the bytes of a KV cache group on one rank, in the host's layout. A store maps keys to pages of
one namespace. It may forget any page at any time, but it never returns bytes other than those that
were written, for which it checks each page that it reads."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_graft.base.metric import Counters
from vllm_graft.hicache.pages.page_key import NAMESPACE_BYTES, PageKey


class ReadStatus(enum.Enum):
    """The result of a read. The buffer may be used only after HIT."""

    HIT = "hit"
    """The buffer holds the page, and the checksum was compared after the page was read."""
    MISS = "miss"
    """The store does not have the page, or no longer."""
    CORRUPT = "corrupt"
    """Bytes, length, key or namespace differ from those written. The store forgets the key."""
    ERROR = "error"
    """The medium failed. The store forgets the key."""


class StorageBackend(ABC):
    """A store of pages of one namespace.

    All methods may be called from several threads at once. Only the constructor raises if the
    medium fails. Later a store with a failed medium declines writes and misses reads. Raises
    `ConfigError` if an option is unknown or wrong, or the medium cannot be opened. `namespace`: 16
    bytes. Pages of other namespaces are never returned. `options`: the backend's options, without
    the key ``backend``; so in all methods."""

    def __init__(self, namespace: bytes, options: Mapping[str, Any]) -> None:
        if len(namespace) != NAMESPACE_BYTES:
            raise ValueError(f"a namespace has {NAMESPACE_BYTES} bytes, got {len(namespace)}")
        self.full = False
        """Whether there is no room for more pages now, because other processes have claimed it."""
        self.namespace = bytes(namespace)
        self.counters = Counters()

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Refuse options with which the store cannot be opened, before a model loads.

        The frontend calls it, and other processes of vLLM may call it too, several times and while
        a store with these options is open. It must leave nothing behind, and must not wait. Raises
        `ConfigError`, which says which option is wrong, and what to do."""
        return

    @classmethod
    def open_elsewhere(cls, options: Mapping[str, Any]) -> Mapping[bytes, int]:
        """Namespaces that a process has open exclusively, with its id; conditions as for check."""
        return {}

    @classmethod
    def too_small(cls, options: Mapping[str, Any], page_bytes: int) -> str | None:
        """Say why the store could not keep a page of the largest pool. It is called before opening.
        Raises `ConfigError` if an option is unknown or wrong.

        Returns:
            A sentence with the flag, its value, and its least possible value; None if pages fit.
        """
        return None

    @abstractmethod
    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Whether each key is in the index. It does no I/O, and a later read may still miss."""

    @abstractmethod
    def read(self, key: PageKey, buffer: memoryview) -> ReadStatus:
        """Fill ``buffer`` with the page of ``key``.

        The buffer is writable and contiguous, with as many bytes as the page should have; a page of
        another length is CORRUPT. Its content is undefined unless the result is HIT."""

    @abstractmethod
    def write(self, key: PageKey, page: memoryview) -> bool:
        """Keep a page, contiguous bytes whose buffer may be reused when the call returns.

        Returns:
            True if the page is kept, or was kept before. This process can read it at once;
            :meth:`flush` makes it durable. False if the store declined it, because it is full or
            closed, the page is too large, or the medium failed. The store counts why.
        """

    @abstractmethod
    def remove(self, key: PageKey) -> None:
        """Forget a page. Unknown keys are ignored."""

    @abstractmethod
    def flush(self) -> bool:
        """Make all pages durable that were written before the call; False if the medium refused."""

    @abstractmethod
    def clear(self) -> bool:
        """Forget every page of the namespace, on the medium too.

        Returns:
            True if no page can be read any more, not even after a restart. False if the medium
            refused to delete pages; this process still does not return them.
        """

    @abstractmethod
    def close(self) -> None:
        """Flush and release the medium, once. Later reads miss and writes are declined."""

    def stats(self) -> dict[str, int]:
        """Counters since the store was opened, and gauges such as ``pages`` and ``bytes``."""
        return self.counters.snapshot()

    def _decline(self, reason: str) -> bool:
        """Count a declined page by its reason, and return False for :meth:`write`."""
        self.counters.add(f"declined_{reason}")
        return False

"""The store. It never returns other bytes than those that were written."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_graft.api import (
    ConfigError,
    Options,
    PageKey,
    ReadStatus,
    StorageBackend,
    option_flag,
    parse_options,
)

_TABLE = """
CREATE TABLE IF NOT EXISTS pages (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    hash BLOB NOT NULL,
    pool INTEGER NOT NULL,
    digest BLOB NOT NULL,
    page BLOB NOT NULL,
    UNIQUE (hash, pool)
)
"""


class SqliteOptions(Options):
    """Keys beside ``"backend": "sqlite"``; unknown ones are refused."""

    path: Path
    """Directory with a database for each namespace."""

    max_bytes: int
    """Bytes of pages in a database, at most. The page that was written first leaves first."""


class SqliteBackend(StorageBackend):
    """Keeps the pages of a namespace in a database of its own."""

    def __init__(self, namespace: bytes, options: Mapping[str, Any]) -> None:
        super().__init__(namespace, options)
        self.options = parse_options(SqliteOptions, options, "storage")
        self._lock = threading.Lock()
        self._closed = False
        try:
            self.options.path.mkdir(parents=True, exist_ok=True)
            file = self.options.path / f"{namespace.hex()}.sqlite"
            self._database = sqlite3.connect(file, check_same_thread=False)
            self._database.execute(_TABLE)
            self._database.commit()
            rows = self._database.execute("SELECT hash, pool, length(page) FROM pages")
            self._lengths = {PageKey(found, pool): length for found, pool, length in rows}
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{option_flag('storage', 'path')}: {str(self.options.path)!r} cannot be used: "
                f"{error}. Give a directory that the engine may write to."
            ) from error

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Refuse wrong options before a model is loaded."""
        parse_options(SqliteOptions, options, "storage")

    @classmethod
    def too_small(cls, options: Mapping[str, Any], page_bytes: int) -> str | None:
        """Say why not even one page would fit."""
        given = parse_options(SqliteOptions, options, "storage").max_bytes
        if page_bytes <= given:
            return None
        return (
            f"{option_flag('storage', 'max_bytes')} is {given}, but a page of KV takes "
            f"{page_bytes} bytes: give at least {page_bytes}."
        )

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Look into the index, which is in memory."""
        return [key in self._lengths for key in keys]

    def read(self, key: PageKey, buffer: memoryview) -> ReadStatus:
        """Fill the buffer, and compare the page with its digest."""
        try:
            with self._lock:
                if self._closed or key not in self._lengths:
                    return ReadStatus.MISS
                query = "SELECT digest, page FROM pages WHERE hash = ? AND pool = ?"
                row = self._database.execute(query, (key.hash, key.pool)).fetchone()
        except sqlite3.Error:
            self.remove(key)
            return ReadStatus.ERROR
        if row is None:
            return ReadStatus.MISS
        digest, page = row
        if len(page) != buffer.nbytes or digest != self._digest(key, page):
            self.remove(key)
            return ReadStatus.CORRUPT
        buffer.cast("B")[:] = page
        self.counters.add("read_hits")
        return ReadStatus.HIT

    def write(self, key: PageKey, page: memoryview) -> bool:
        """Keep a page, and make room for it."""
        data = bytes(page)
        if len(data) > self.options.max_bytes:
            return self._decline("too_large")
        row = (key.hash, key.pool, self._digest(key, data), data)
        try:
            with self._lock:
                if self._closed:
                    return self._decline("closed")
                self._make_room(len(data) - self._lengths.get(key, 0))
                values = "(hash, pool, digest, page) VALUES (?, ?, ?, ?)"
                self._database.execute(f"INSERT OR REPLACE INTO pages {values}", row)
                self._lengths[key] = len(data)
        except sqlite3.Error:
            return self._decline("write_error")
        return True

    def remove(self, key: PageKey) -> None:
        """Forget a page."""
        with self._lock:
            self._remove(key)

    def flush(self) -> bool:
        """Make what was written durable: SQLite syncs when it commits."""
        with self._lock:
            return self._closed or self._commit()

    def clear(self) -> bool:
        """Forget all pages."""
        with self._lock:
            self._lengths.clear()
            if self._closed:
                return False
            try:
                self._database.execute("DELETE FROM pages")
            except sqlite3.Error:
                return False
            return self._commit()

    def close(self) -> None:
        """Commit and close; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._commit()
                self._database.close()
            self._closed = True

    def _digest(self, key: PageKey, page: bytes) -> bytes:
        named = self.namespace + key.pool.to_bytes(4, "little") + key.hash
        return hashlib.blake2b(named + page, digest_size=16).digest()

    def _make_room(self, size: int) -> None:
        room = self.options.max_bytes - sum(self._lengths.values())
        # A dict keeps the order of insertion: the first key was written first.
        for key in [*self._lengths]:
            if room >= size:
                return
            room += self._lengths[key]
            self._remove(key)

    def _remove(self, key: PageKey) -> None:
        if self._lengths.pop(key, None) is None or self._closed:
            return
        try:
            query = "DELETE FROM pages WHERE hash = ? AND pool = ?"
            self._database.execute(query, (key.hash, key.pool))
        except sqlite3.Error:
            self.counters.add("remove_errors")

    def _commit(self) -> bool:
        try:
            self._database.commit()
        except sqlite3.Error:
            return False
        return True

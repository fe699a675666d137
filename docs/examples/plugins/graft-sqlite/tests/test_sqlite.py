"""The contract of every store, and what is this one's own."""

import sqlite3

import graft_sqlite
import pytest
from graft_sqlite.store import SqliteBackend

from vllm_graft.api import ConfigError, PageKey, ReadStatus
from vllm_graft.testing import StorageBackendContract

NAMESPACE = bytes(range(16))


def options(folder, max_bytes=10**7):
    return {"path": str(folder), "max_bytes": max_bytes}


class TestSqlite(StorageBackendContract):
    @pytest.fixture
    def open_backend(self, tmp_path):
        return lambda namespace: SqliteBackend(namespace, options(tmp_path))


def test_the_first_page_leaves_first(tmp_path):
    store = SqliteBackend(NAMESPACE, options(tmp_path, 250))
    keys = [PageKey(bytes([number]) * 32, 0) for number in range(3)]
    assert all(store.write(key, memoryview(bytes(100))) for key in keys)
    assert store.contains(keys) == [False, True, True]
    assert not store.write(keys[0], memoryview(bytes(251)))
    store.close()


def test_a_changed_page_is_corrupt(tmp_path):
    key = PageKey(b"k" * 32, 0)
    store = SqliteBackend(NAMESPACE, options(tmp_path))
    assert store.write(key, memoryview(b"right"))
    store.close()
    [file] = tmp_path.glob("*.sqlite")
    with sqlite3.connect(file) as database:
        database.execute("UPDATE pages SET page = ?", (b"wrong",))
    store = SqliteBackend(NAMESPACE, options(tmp_path))
    assert store.read(key, memoryview(bytearray(5))) is ReadStatus.CORRUPT
    assert store.contains([key]) == [False]


@pytest.mark.parametrize("wrong", [{}, {"path": "x"}, {**options("x"), "size": 3}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.storage"):
        SqliteBackend.check(wrong)


def test_the_entry_leads_to_it():
    [entry] = graft_sqlite.graft_storage_backends()
    assert entry.resolve() is SqliteBackend

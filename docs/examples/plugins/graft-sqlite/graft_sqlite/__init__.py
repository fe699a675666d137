"""graft-sqlite: pages of vllm-graft's host KV cache in an SQLite database.

::

    "storage": {"backend": "sqlite", "path": "/var/cache/graft", "max_bytes": "64GiB"}
"""

from vllm_graft.api import entries, hookimpl


@hookimpl
def graft_storage_backends() -> list[entries.StorageBackend]:
    """Offer the store, by the name that `storage.backend` chooses it by."""
    load = "graft_sqlite.store:SqliteBackend"
    return [entries.StorageBackend("sqlite", load, "pages in an SQLite database, bounded")]

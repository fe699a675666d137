"""A directory that others can write to: the store opens its own files, and nothing else."""

import os
import stat
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.host_cache.storage_sharers import write_all
from tests.support.processes import finished
from vllm_graft.base.errors import ConfigError
from vllm_graft.base.locks import open_own
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.testing.contracts.cache_contracts import (
    NAMESPACE,
    OTHER,
    page_key,
    page_of,
    read_page,
)

OPTIONS = {"max_bytes": "8MiB", "segment_bytes": "64KiB"}
KEYS = [page_key(number) for number in range(30)]
SECRET = b"not a page" * 1000


def segments(path: Path, namespace: bytes = NAMESPACE) -> SegmentsBackend:
    return SegmentsBackend(namespace, {"path": path, **OPTIONS})


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """The namespace's directory of a store with pages, which is closed."""
    store = segments(tmp_path / "root")
    assert all(write_all(store, KEYS))
    store.close()
    return tmp_path / "root" / NAMESPACE.hex()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of this user that is no business of the store's."""
    file = tmp_path / "victim"
    file.write_bytes(SECRET)
    return file


def link(victim: Path, path: Path) -> None:
    path.symlink_to(victim)


def hard_link(victim: Path, path: Path) -> None:
    path.hardlink_to(victim)


def pipe(victim: Path, path: Path) -> None:
    os.mkfifo(path)


PLANTS = pytest.mark.parametrize("plant", [link, hard_link, pipe])
Plant = Callable[[Path, Path], None]


@PLANTS
@pytest.mark.parametrize("suffix", [".index", ".data"])
def test_what_stands_in_for_a_file_is_not_opened(
    full: Path, victim: Path, plant: Plant, suffix: str
) -> None:
    file = sorted(full.glob(f"*{suffix}"))[0]
    file.unlink()
    plant(victim, file)
    store = segments(full.parent)
    for key in KEYS:
        status, page = read_page(store, key)
        assert page == page_of(key) or status.value != "hit"
        assert store.write(key, memoryview(page_of(key)))
    assert store.flush()
    assert all(read_page(store, key)[1] == page_of(key) for key in KEYS)
    store.close()
    assert victim.read_bytes() == SECRET


@PLANTS
def test_a_file_that_is_replaced_while_the_store_is_open(
    full: Path, victim: Path, plant: Plant
) -> None:
    store = segments(full.parent)
    assert store.write(page_key(99), memoryview(page_of(page_key(99))))
    file = sorted(full.glob("*.index"))[-1]
    file.unlink()
    plant(victim, file)
    assert not store.flush()
    store.close()
    assert victim.read_bytes() == SECRET


@PLANTS
def test_a_lock_that_is_none_does_not_make_anybody_wait(
    full: Path, victim: Path, plant: Plant
) -> None:
    """Neither the frontend's look at all namespaces, nor a neighbour that makes room."""
    (full / "LOCK").unlink()
    plant(victim, full / "LOCK")
    code = f"""
        from tests.hicache.storage.test_storage_owner import *
        from vllm_graft.hicache.storage.segments.neighbours import holders
        path = Path({str(full.parent)!r})
        assert holders(path) == {{}}
        store = segments(path, OTHER)
        assert all(write_all(store, KEYS))
        store.close()
        try:
            segments(path)
        except ConfigError as error:
            print(error)
    """
    command = [sys.executable, "-P", "-c", textwrap.dedent(code)]
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    assert f"{full / 'LOCK'}" in finished(*command, env=where, timeout=60)
    assert victim.read_bytes() == SECRET


def test_a_directory_that_is_a_link_is_no_namespace(full: Path, tmp_path: Path) -> None:
    """Files below it are another store's. They are neither deleted nor written to."""
    elsewhere = tmp_path / "elsewhere"
    full.rename(elsewhere)
    full.symlink_to(elsewhere)
    before = {file.name: file.read_bytes() for file in elsewhere.iterdir()}
    with pytest.raises(ConfigError, match="is no directory"):
        segments(full.parent)
    other = SegmentsBackend(OTHER, {"path": full.parent, "max_bytes": "1MiB"})
    for number in range(800):
        other.write(page_key(number), memoryview(page_of(page_key(number))))
    other.close()
    assert {file.name: file.read_bytes() for file in elsewhere.iterdir()} == before


def test_modes_are_for_one_user(full: Path) -> None:
    for path in (full.parent, full):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    for path in full.parent.rglob("*"):
        assert path.is_dir() or stat.S_IMODE(path.stat().st_mode) == 0o600, path
    # A namespace's directory of an earlier version is narrowed, and what is above is left.
    full.chmod(0o755)
    full.parent.chmod(0o750)
    segments(full.parent).close()
    assert stat.S_IMODE(full.stat().st_mode) == 0o700
    assert stat.S_IMODE(full.parent.stat().st_mode) == 0o750


def test_pages_of_another_user_are_neither_read_nor_deleted(
    full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    before = sorted(full.iterdir())
    monkeypatch.setattr("vllm_graft.base.locks.os.geteuid", lambda: user + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {user}, and this process runs as"):
        segments(full.parent)
    with pytest.raises(PermissionError, match=f"belongs to user {user}"):
        open_own(before[0], os.O_RDWR)
    assert sorted(full.iterdir()) == before

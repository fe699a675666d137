"""A medium that refuses: full, read-only, broken. The store declines, counts, and goes on."""

import errno
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_cache.storage_sharers import disk_bytes, hits, write_all
from tests.support.processes import finished
from vllm_graft.base.errors import ConfigError
from vllm_graft.base.log import warning_once
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus
from vllm_graft.hicache.storage.files import Buffer, Files
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.testing.contracts.cache_contracts import NAMESPACE, page_key, page_of, read_page

KEYS = [page_key(number) for number in range(30)]
OPTIONS: dict[str, Any] = {"max_bytes": "8MiB", "segment_bytes": "64KiB"}


class Medium(Files):
    """A medium that fails on demand.

    ``room`` bytes can be written before the disk is full. If ``disk`` is given, it is the directory
    whose files never take more than ``size`` bytes.
    """

    def __init__(self, disk: Path | None = None, size: int = 0) -> None:
        self.disk, self.size = disk, size
        self.room: int | None = None
        self.errors: dict[str, int] = {}

    def _fail(self, call: str) -> None:
        if call in self.errors:
            raise OSError(self.errors[call], os.strerror(self.errors[call]))

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._fail("read")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._fail("write")
        if self.disk is not None:
            self.room = self.size - disk_bytes(self.disk)
        if self.room is None:
            return super().pwritev(fd, buffers, offset)
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = super().pwritev(fd, [buffers[0][: self.room]], offset)
        self.room -= done
        return done

    def fdatasync(self, fd: int) -> None:
        self._fail("sync")
        super().fdatasync(fd)

    def create(self, path: Path) -> int:
        self._fail("create")
        return super().create(path)

    def sync_directory(self, path: Path) -> None:
        self._fail("sync_directory")
        super().sync_directory(path)


def segments(path: Path, medium: Files) -> SegmentsBackend:
    return SegmentsBackend(NAMESPACE, OPTIONS | {"path": path}, medium)


def pages(first: int, end: int) -> list[PageKey]:
    return [page_key(number) for number in range(first, end)]


def filled(path: Path) -> tuple[Medium, SegmentsBackend]:
    medium = Medium()
    store = segments(path, medium)
    assert all(write_all(store, KEYS))
    return medium, store


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_the_oldest_pages_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The disk has 200,000 bytes, far less than `max_bytes`: the newest pages are there."""
    medium = Medium(tmp_path, 200_000)
    monkeypatch.setattr(errno, "ENOSPC", number)
    store = segments(tmp_path, medium)
    keys = pages(0, 300)
    for key in keys:
        assert store.write(key, memoryview(page_of(key)))
        assert disk_bytes(tmp_path) <= 200_000
    there = store.contains(keys)
    assert there[-1]
    assert sum(there) > 25
    assert all(hits(store, keys[-20:]))
    assert store.stats()["evicted_segments"] > 10
    store.close()
    assert sum(segments(tmp_path, Files()).contains(keys)) > 25


def test_a_disk_that_others_fill_takes_no_more_than_a_segment_at_a_time(tmp_path: Path) -> None:
    """Nothing that is freed is left for the store."""
    medium, store = filled(tmp_path)
    keys = pages(100, 140)
    assert all(write_all(store, keys))
    medium.room = 0
    new = pages(1000, 1100)
    assert not any(write_all(store, new))
    assert store.stats()["evicted_segments"] == 1
    assert sum(store.contains(KEYS + keys)) > 45
    assert store.full
    # A disk that takes bytes again takes pages again.
    medium.room = None
    store._space._full_until = 0
    assert store.write(new[0], memoryview(page_of(new[0])))
    assert disk_bytes(tmp_path) < 8 << 20


def test_writes_that_keep_failing_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warning_once.cache_clear()
    medium, store = filled(tmp_path)
    medium.errors = {"write": errno.EIO}
    assert not any(write_all(store, pages(100, 400)))
    words = "The last 32 pages could not be written below"
    assert caplog.text.count(words) == 1
    assert os.strerror(errno.EIO) in caplog.text
    assert store.stats()["declined_error"] == 300


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_removed_directory_is_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "root"
    before = open_files()
    store = segments(root, Files())
    for start in (0, 100, 200):
        shutil.rmtree(root, ignore_errors=True)
        keys = pages(start, start + 60)
        write_all(store, keys)
        store.flush()
        store.flush()
        assert all(write_all(store, keys))
        assert store.flush()
        assert all(hits(store, keys))
    assert store.stats()["renewed_directories"] == 3
    # Deleted files are closed, and the lock holds again.
    assert open_files() - before == 1 + store.stats()["segments"]
    with pytest.raises(ConfigError, match="another process has"):
        segments(root, Files())
    store.close()
    assert open_files() == before
    assert sum(segments(root, Files()).contains(keys)) == 60


def test_another_process_s_directory_in_its_place_is_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = segments(root, Files())
    assert all(write_all(store, KEYS))
    shutil.rmtree(root)
    other = segments(root, Files())
    keys = pages(500, 530)
    assert all(write_all(other, keys))
    assert other.flush()
    assert not store.flush()
    assert not store.clear()
    for _ in range(3):
        store._space._full_until = 0
        assert not any(write_all(store, KEYS))
    assert all(hits(other, keys))
    other.close()
    # When the other has closed it, its pages are found.
    store._space._full_until = 0
    assert all(write_all(store, KEYS))
    assert all(store.contains(keys))
    store.close()
    assert sum(SegmentsBackend(NAMESPACE, OPTIONS | {"path": root}).contains(keys)) == 30


def test_a_limit_of_the_system_is_no_crash(tmp_path: Path) -> None:
    """The kernel itself refuses above RLIMIT_FSIZE (EFBIG, and SIGXFSZ, which Python ignores)."""
    code = f"""
        import resource, sys
        from vllm_graft.hicache.storage.segments.store import SegmentsBackend
        from vllm_graft.testing.contracts.cache_contracts import NAMESPACE, page_key
        from vllm_graft.testing.contracts.cache_contracts import page_of, read_page
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        options = {{"path": {str(tmp_path)!r}, "max_bytes": "8MiB", "segment_bytes": "64KiB"}}
        store = SegmentsBackend(NAMESPACE, options)
        keys = [page_key(number) for number in range(30)]
        written = [store.write(key, memoryview(page_of(key))) for key in keys]
        found = [read_page(store, key) for key in keys]
        assert [status.value == "hit" for status, _ in found] == written
        assert all(page == page_of(key) for key, (_, page), w in zip(keys, found, written) if w)
        assert store.flush()
        store.close()
        print(sum(written), store.stats().get("write_errors", 0))
    """
    said = finished(sys.executable, "-P", "-c", textwrap.dedent(code), timeout=60)
    written, errors = map(int, said.split())
    # A segment that may not grow any further is followed by another one.
    assert (written, errors) == (30, 0)
    assert sum(hits(segments(tmp_path, Files()), KEYS)) == 30


@pytest.mark.parametrize("path", ["/dev/null/store", "/proc/store"])
def test_a_path_that_cannot_be_made_is_an_error(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        segments(Path(path), Files())


def test_a_read_only_directory_at_start_is_an_error(tmp_path: Path) -> None:
    # A file is in the way, because chmod does not stop root.
    (tmp_path / NAMESPACE.hex()).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"storage\.path"):
        segments(tmp_path, Files())


def test_read_only_later_it_reads_on(tmp_path: Path) -> None:
    medium, store = filled(tmp_path)
    assert store.flush()
    medium.errors = dict.fromkeys(("write", "create", "sync", "sync_directory"), errno.EROFS)
    assert all(hits(store, KEYS))
    assert not any(write_all(store, pages(100, 140)))
    assert all(hits(store, KEYS))
    store.close()
    assert all(hits(segments(tmp_path, Files()), KEYS))


def test_a_read_error_forgets_the_key(tmp_path: Path) -> None:
    medium, store = filled(tmp_path)
    medium.errors = {"read": errno.EIO}
    assert read_page(store, KEYS[0])[0] is ReadStatus.ERROR
    assert store.contains(KEYS[:2]) == [False, True]
    assert store.stats()["read_errors"] == 1
    medium.errors = {}
    assert hits(store, KEYS) == [False] + [True] * 29


def test_data_that_cannot_be_synced_is_given_up(tmp_path: Path) -> None:
    """After a failed fdatasync the pages may be gone from the page cache, marked clean."""
    medium, store = filled(tmp_path)
    medium.errors = {"sync": errno.EIO}
    assert not store.flush()
    assert not any(hits(store, KEYS))
    assert store.stats()["lost_segments"] == 2
    medium.errors = {}
    assert all(write_all(store, KEYS))
    assert store.flush()
    store.close()
    assert all(hits(segments(tmp_path, Files()), KEYS))


def test_an_index_that_cannot_be_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errno, "ENOSPC", errno.EIO)
    medium, store = filled(tmp_path)
    medium.room = 50
    assert not store.flush()
    assert store.stats()["commit_errors"] == 2
    assert all(hits(store, KEYS))
    medium.room = None
    assert store.flush()
    store.close()
    reopened = segments(tmp_path, Files())
    assert reopened.stats()["salvaged_pages"] == 0
    assert all(hits(reopened, KEYS))


def test_what_cannot_be_deleted_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = segments(tmp_path, Files())
    assert all(write_all(store, KEYS))

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert not store.clear()
    assert not any(hits(store, KEYS))
    assert store.stats()["clear_errors"] == 1
    assert store.clear()
    store.close()
    assert not any(hits(segments(tmp_path, Files()), KEYS))

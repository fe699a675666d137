"""The ``nixl`` store: the contract, with NIXL's real plugin, and what is refused without it."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.faults.injector import FaultInjector, FaultOptions
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.faulty import inject
from vllm_graft.hicache.storage.files import Files
from vllm_graft.hicache.storage.segments import nixl_store
from vllm_graft.hicache.storage.segments.nixl_store import NixlBackend, NixlFiles
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.testing import StorageBackendContract
from vllm_graft.testing.contracts.cache_contracts import (
    NAMESPACE,
    page_key,
    page_of,
    read_page,
)

OPTIONS: dict[str, Any] = {"max_bytes": "4MiB", "segment_bytes": "64KiB", "sync_bytes": 20_000}
Open = Callable[[bytes], StorageBackend]
IO = ("aio", "posix_aio", "uring")

with_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None,
    reason="NIXL is not installed: pip install nixl",
)


@with_nixl
class TestNixl(StorageBackendContract):
    @pytest.fixture
    def open_backend(self, tmp_path: Path) -> Open:
        return lambda namespace: NixlBackend(namespace, {"path": tmp_path, **OPTIONS})


class Seen(NixlFiles):
    """Counts the bytes that NIXL moves."""

    def __init__(self, io: str) -> None:
        super().__init__(io)
        self.moved: dict[str, int] = {"READ": 0, "WRITE": 0}

    def _transfer(self, way: str, fd: int, buffer: memoryview, offset: int) -> None:
        super()._transfer(way, fd, buffer, offset)
        self.moved[way] += buffer.nbytes


@with_nixl
@pytest.mark.parametrize("io", IO)
def test_nixl_moves_every_byte(tmp_path: Path, io: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object) -> int:
        raise AssertionError("a byte went past NIXL")

    monkeypatch.setattr(os, "preadv", forbidden)
    monkeypatch.setattr(os, "pwritev", forbidden)
    files = Seen(io)
    store = NixlBackend(NAMESPACE, {"path": tmp_path, "io": io, **OPTIONS}, files)
    keys = [page_key(number) for number in range(8)]
    assert all(store.write(key, memoryview(page_of(key))) for key in keys)
    assert all(read_page(store, key) == (ReadStatus.HIT, page_of(key)) for key in keys)
    assert files.moved["WRITE"] > files.moved["READ"] >= 8 * (3000 + 128)
    store.close()
    # Negative control: the plain store makes the calls that are forbidden here.
    with pytest.raises(AssertionError, match="past NIXL"):
        SegmentsBackend(bytes(16), {"path": tmp_path, **OPTIONS}).write(
            keys[0], memoryview(page_of(keys[0]))
        )


@with_nixl
def test_segments_and_nixl_read_each_others_pages(tmp_path: Path) -> None:
    kinds: Sequence[type[SegmentsBackend]] = (NixlBackend, SegmentsBackend)
    for number, (writes, reads) in enumerate([kinds, kinds[::-1]]):
        options = {"path": tmp_path / str(number), **OPTIONS}
        first, key = writes(NAMESPACE, options), page_key(number)
        assert first.write(key, memoryview(page_of(key)))
        first.close()
        second = reads(NAMESPACE, options)
        assert read_page(second, key) == (ReadStatus.HIT, page_of(key))
        second.close()


@with_nixl
def test_threads_read_and_write_at_once(tmp_path: Path) -> None:
    """Also the same page at the same time: each thread has an agent of its own."""
    store = NixlBackend(NAMESPACE, {"path": tmp_path, **OPTIONS, "segment_bytes": "1MiB"})
    shared = page_key(1000)
    store.write(shared, memoryview(page_of(shared)))

    def work(thread: int) -> None:
        for number in range(30):
            key = page_key(thread * 30 + number)
            assert store.write(key, memoryview(page_of(key)))
            assert read_page(store, key) == (ReadStatus.HIT, page_of(key))
            assert read_page(store, shared) == (ReadStatus.HIT, page_of(shared))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    store.close()


@with_nixl
@pytest.mark.parametrize("io", IO)
def test_reads_end_where_the_file_does(tmp_path: Path, io: str) -> None:
    path, content = tmp_path / "file", random.Random(3).randbytes(10_000)
    path.write_bytes(content)
    fd = os.open(path, os.O_RDWR)
    try:
        files = NixlFiles(io)
        for offset, size in ((0, 10_000), (4_000, 6_001), (9_999, 50), (10_000, 5), (20_000, 5)):
            found, wanted = bytearray(size), bytearray(size)
            done = files.read(
                fd, [memoryview(found)[: size // 2], memoryview(found)[size // 2 :]], offset
            )
            assert done == Files().read(fd, [wanted], offset)
            assert found == wanted
    finally:
        os.close(fd)


@with_nixl
def test_what_nixl_refuses_is_an_error_of_the_medium(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    try:
        os.write(fd, b"page")
        files = NixlFiles("aio")
        with pytest.raises(OSError, match="NIXL"):
            files.preadv(fd, [memoryview(bytearray(4))], 0)
        # The next call has a new agent.
        assert files.pwritev(fd, [memoryview(b"more")], 4) == 4
        assert (tmp_path / "file").read_bytes() == b"pagemore"
    finally:
        os.close(fd)


@with_nixl
def test_injected_faults_reach_nixls_calls(tmp_path: Path) -> None:
    files = Seen("aio")
    store = NixlBackend(NAMESPACE, {"path": tmp_path, **OPTIONS}, files)
    faulty = inject(store, FaultInjector(FaultOptions(seed=1, rate=0.3)))
    kept = [key for key in map(page_key, range(60)) if faulty.write(key, memoryview(page_of(key)))]
    found = [read_page(faulty, key) for key in kept]
    hits = [
        page == page_of(key)
        for key, (status, page) in zip(kept, found, strict=True)
        if status is ReadStatus.HIT
    ]
    assert hits
    assert all(hits)
    assert len(hits) < 60
    assert files.moved["READ"] > 0


def test_a_missing_package_is_refused_before_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_store.importlib.util, "find_spec", lambda name: None)
    for refuses in (NixlBackend.check, lambda options: NixlBackend(NAMESPACE, options)):
        with pytest.raises(ConfigError, match=r"storage\.backend: 'nixl' needs the package nixl"):
            refuses({"path": tmp_path, **OPTIONS})
    assert not list(tmp_path.iterdir())


def test_an_interface_that_the_machine_lacks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: NixlFiles) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(nixl_store.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(NixlFiles, "open_agent", refused)
    with pytest.raises(ConfigError, match="cannot move bytes by 'uring' on this machine") as error:
        NixlBackend.check({"path": tmp_path, "io": "uring", **OPTIONS})
    assert "storage.io" in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"io": "gds"}, "storage.io: 'gds' is refused"),
        ({"sync_byte": 1}, "Did you mean 'sync_bytes'?"),
        ({"gds": True}, "storage.gds: unknown key. Known: io, max_bytes"),
    ],
)
def test_wrong_options_are_errors(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match="--kv-transfer-config") as error:
        NixlBackend.check({"path": tmp_path, **OPTIONS, **options})
    assert message in str(error.value)

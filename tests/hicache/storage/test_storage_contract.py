"""Our stores against the contract, against a dict, and promises that only they make."""

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.host_cache.storage_sharers import disk_bytes
from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.hooks.manager import Manager
from vllm_graft.testing import StorageBackendContract
from vllm_graft.testing.contracts.cache_contracts import (
    NAMESPACE,
    OTHER,
    page_key,
    page_of,
    read_page,
)

OPTIONS = {"max_bytes": "4MiB", "segment_bytes": "64KiB", "sync_bytes": 20_000}
Open = Callable[[bytes], StorageBackend]


pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


class TestSegments(StorageBackendContract):
    @pytest.fixture
    def open_backend(self, tmp_path: Path) -> Open:
        return lambda namespace: SegmentsBackend(namespace, {"path": tmp_path, **OPTIONS})


def test_it_is_offered_by_name() -> None:
    offers = Manager().offers("graft_storage_backends")
    classes = {offer.entry.name: offer.entry.resolve() for offer in offers}
    assert classes == {"segments": SegmentsBackend}


def test_a_segment_is_at_most_half(tmp_path: Path) -> None:
    options = {"path": tmp_path, "max_bytes": "4MiB", "segment_bytes": "3MiB"}
    with pytest.raises(ConfigError, match="over half of max_bytes"):
        SegmentsBackend(NAMESPACE, options)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    first = SegmentsBackend(NAMESPACE, {"path": tmp_path, **OPTIONS})
    with pytest.raises(ConfigError, match="another process has"):
        SegmentsBackend(NAMESPACE, {"path": tmp_path, **OPTIONS})
    SegmentsBackend(OTHER, {"path": tmp_path, **OPTIONS}).close()
    first.close()
    SegmentsBackend(NAMESPACE, {"path": tmp_path, **OPTIONS}).close()


def test_bytes_on_disk_stay_below_the_cap(tmp_path: Path) -> None:
    options = {"path": tmp_path, "max_bytes": "1MiB", "segment_bytes": "128KiB"}
    backend = SegmentsBackend(NAMESPACE, options)
    keys = [page_key(number) for number in range(1000)]
    for number, key in enumerate(keys):
        assert backend.write(key, memoryview(page_of(key)))
        if number % 100 == 0:
            assert disk_bytes(tmp_path) <= 1 << 20
    stats = backend.stats()
    assert disk_bytes(tmp_path) <= 1 << 20
    assert stats["bytes"] <= 1 << 20
    # Over two thirds of the room are used: pages do not all leave at once.
    assert stats["pages"] * 3000 > 700_000
    assert sum(backend.contains(keys)) == stats["pages"]
    assert backend.contains(keys[-100:]) == [True] * 100
    assert read_page(backend, keys[-1]) == (ReadStatus.HIT, page_of(keys[-1]))


def test_the_segment_that_is_read_stays(tmp_path: Path) -> None:
    options = {"path": tmp_path, "max_bytes": "1MiB", "segment_bytes": "128KiB"}
    backend = SegmentsBackend(NAMESPACE, options)
    hot = page_key(0)
    backend.write(hot, memoryview(page_of(hot)))
    for number in range(1, 1000):
        backend.write(page_key(number), memoryview(page_of(page_key(number))))
        assert read_page(backend, hot) == (ReadStatus.HIT, page_of(hot))
    assert backend.stats()["evicted_segments"] > 3


def test_another_models_pages_leave_first(tmp_path: Path) -> None:
    options = {"path": tmp_path, "max_bytes": "1MiB", "segment_bytes": "128KiB"}
    old = SegmentsBackend(OTHER, options)
    for number in range(200):
        assert old.write(page_key(number), memoryview(page_of(page_key(number))))
    held = SegmentsBackend(bytes(16), options)
    assert held.write(page_key(1), memoryview(page_of(page_key(1))))
    old.close()
    new = SegmentsBackend(NAMESPACE, options)
    for number in range(200):
        assert new.write(page_key(number), memoryview(page_of(page_key(number))))
    assert new.contains([page_key(number) for number in range(200)]) == [True] * 200
    assert new.stats()["deleted_bytes_of_others"] > 400_000
    assert disk_bytes(tmp_path) <= 1 << 20
    # A namespace that is open is left alone.
    assert read_page(held, page_key(1)) == (ReadStatus.HIT, page_of(page_key(1)))
    # Only as much was deleted as necessary, the oldest first.
    reopened = SegmentsBackend(OTHER, options)
    found = reopened.contains([page_key(number) for number in range(200)])
    assert found == sorted(found)
    assert 0 < sum(found) < 100


def test_what_cannot_be_kept_is_declined_and_counted(tmp_path: Path) -> None:
    backend = SegmentsBackend(NAMESPACE, {"path": tmp_path, "max_bytes": "1MiB"})
    assert not backend.write(page_key(1), memoryview(bytes(2 << 20)))
    assert not backend.write(PageKey(b"", 0), memoryview(b"page"))
    assert not backend.write(PageKey(bytes(65), 0), memoryview(b"page"))
    assert not backend.write(PageKey(b"key", 1 << 16), memoryview(b"page"))
    assert backend.stats()["declined_too_large"] == 4
    assert backend.stats()["pages"] == 0


@pytest.mark.parametrize(
    ("options", "largest", "flag"),
    [
        ({"max_bytes": "1MiB"}, (128 << 10) - 448, "storage.max_bytes is 1048576"),
        (
            {"max_bytes": "4MiB", "segment_bytes": "64KiB"},
            (64 << 10) - 448,
            "storage.segment_bytes is 65536",
        ),
    ],
)
def test_options_that_hold_no_page_are_told_before_a_store_is_opened(
    tmp_path: Path, options: dict[str, object], largest: int, flag: str
) -> None:
    """The largest page that is not refused is kept, and a refused one is not."""
    options = {"path": tmp_path, **options}
    assert SegmentsBackend.too_small(options, largest) is None
    problem = SegmentsBackend.too_small(options, largest + 1) or ""
    assert flag in problem
    assert f"but a page of KV takes {largest + 1 + 448} " in problem
    assert not list(tmp_path.iterdir())
    store = SegmentsBackend(NAMESPACE, options)
    assert store.write(page_key(1), memoryview(bytes(largest)))
    assert not store.write(page_key(2), memoryview(bytes(largest + 1)))
    # With the bytes that the message asks for, a page fits.
    numbers = [int(number) for number in re.findall(r"at least (\d+)", problem)]
    store.close()
    enough = {**options, "segment_bytes": numbers[0], "max_bytes": max(numbers[1], 1 << 20)}
    assert SegmentsBackend.too_small(enough, largest + 1) is None
    assert SegmentsBackend(NAMESPACE, enough).write(page_key(2), memoryview(bytes(largest + 1)))


MODEL_KEYS = [page_key(number, number % 2) for number in range(10)]
LENGTHS = [1, 7, 1000, 5000]
keys = st.sampled_from(MODEL_KEYS)
lengths = st.sampled_from(LENGTHS)


class Segments(RuleBasedStateMachine):
    """A store without evictions, which has to agree with the dict in everything."""

    options: ClassVar[dict[str, Any]] = {
        "max_bytes": 64 << 20,
        "segment_bytes": 64 << 10,
        "sync_bytes": 8000,
    }
    evicts = False

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="graft-model-"))
        self.model: dict[PageKey, bytes] = {}
        self.store = self.open()

    def open(self) -> StorageBackend:
        return SegmentsBackend(NAMESPACE, {"path": self.path, **self.options})

    @rule(key=keys, length=lengths)
    def write(self, key: PageKey, length: int) -> None:
        page = page_of(key, length)
        if self.store.write(key, memoryview(page)):
            self.model[key] = page
        else:
            assert self.evicts

    @rule(key=keys, length=lengths)
    def read(self, key: PageKey, length: int) -> None:
        status, found = read_page(self.store, key, length)
        expected = self.model.get(key)
        if status is ReadStatus.HIT:
            assert found == expected
        elif expected is None or self.evicts:
            assert status in (ReadStatus.MISS, ReadStatus.CORRUPT)
        else:
            assert status is ReadStatus.CORRUPT
            assert len(expected) != length
        if status is not ReadStatus.HIT:
            self.model.pop(key, None)

    @rule(key=keys)
    def remove(self, key: PageKey) -> None:
        self.store.remove(key)
        self.model.pop(key, None)

    @rule()
    def flush(self) -> None:
        assert self.store.flush()

    @rule()
    def clear(self) -> None:
        assert self.store.clear()
        self.model.clear()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.open()

    @precondition(lambda self: not self.evicts)
    @invariant()
    def same_keys(self) -> None:
        assert self.store.contains(MODEL_KEYS) == [key in self.model for key in MODEL_KEYS]
        assert self.store.stats()["pages"] == len(self.model)

    @invariant()
    def within_the_cap(self) -> None:
        assert self.store.stats()["bytes"] <= int(self.options["max_bytes"])

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.path)


class EvictingSegments(Segments):
    evicts = True
    options: ClassVar = {"max_bytes": 1 << 20, "segment_bytes": 64 << 10, "sync_bytes": 1 << 20}

    @rule(first=st.integers(100, 10**9))
    def fill(self, first: int) -> None:
        for number in range(first, first + 60):
            self.store.write(page_key(number), memoryview(page_of(page_key(number), 5000)))


@pytest.mark.parametrize("machine", [Segments, EvictingSegments])
def test_store_against_a_dict(machine: type[Segments]) -> None:
    # There is no deadline, because a step may wait for the disk.
    config = settings(max_examples=20, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(machine, settings=config)  # type: ignore[no-untyped-call]

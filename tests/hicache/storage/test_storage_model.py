"""The store against a dict, in sequences that hypothesis chooses."""

from __future__ import annotations

import shutil
import tempfile
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

from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.testing.contracts.cache_contracts import NAMESPACE, page_key, page_of, read_page

KEYS = [page_key(number, number % 2) for number in range(10)]
LENGTHS = [1, 7, 1000, 5000]
keys = st.sampled_from(KEYS)
lengths = st.sampled_from(LENGTHS)


pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


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
        assert self.store.contains(KEYS) == [key in self.model for key in KEYS]
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

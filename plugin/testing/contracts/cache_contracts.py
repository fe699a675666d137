"""Contracts of the host KV cache's hooks: storage backends and eviction policies.

::

    class TestTape(StorageBackendContract):
        @pytest.fixture
        def open_backend(self, tmp_path):
            return lambda namespace: Tape(namespace, {"path": tmp_path})
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm_graft.hicache.host.eviction import EvictionPolicy
    from vllm_graft.hicache.pages.page_key import PageKey
    from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend

OpenBackend = Callable[[bytes], "StorageBackend"]
PAGE_BYTES = 3000
NAMESPACE, OTHER = bytes(range(16)), bytes(range(1, 17))


def page_key(number: int, pool: int = 0) -> PageKey:
    """A key like vLLM's: 32 bytes that look random."""
    from vllm_graft.hicache.pages.page_key import PageKey

    return PageKey(random.Random(number).randbytes(32), pool)


def page_of(key: PageKey, length: int = PAGE_BYTES) -> bytes:
    """The only right content of a key: whoever reads can tell without having written."""
    return random.Random(key.hash + bytes([key.pool % 256])).randbytes(length)


def read_page(
    backend: StorageBackend, key: PageKey, length: int = PAGE_BYTES
) -> tuple[ReadStatus, bytes]:
    """What the store says, and what it left in the buffer."""
    buffer = bytearray(b"\xee" * length)
    return backend.read(key, memoryview(buffer)), bytes(buffer)


def assert_hit(backend: StorageBackend, key: PageKey) -> None:
    """Check that the store has a key, with its only right content."""
    status, page = read_page(backend, key)
    assert (status.value, page) == ("hit", page_of(key))


class StorageBackendContract:
    """For entries of ``graft_storage_backends``. Give a fixture ``open_backend``."""

    @pytest.fixture
    def open_backend(self) -> OpenBackend:
        """Opens the store of a namespace; again with the same one finds what was flushed."""
        raise NotImplementedError("give a fixture `open_backend`")

    @pytest.fixture
    def backend(self, open_backend: OpenBackend) -> StorageBackend:
        """An empty store."""
        return open_backend(NAMESPACE)

    def test_what_was_written_is_read(self, backend: StorageBackend) -> None:
        keys = [page_key(number, number % 3) for number in range(20)]
        assert [backend.write(key, memoryview(page_of(key))) for key in keys] == [True] * 20
        assert backend.contains(keys) == [True] * 20
        host = memoryview(bytearray(20 * PAGE_BYTES)).cast("B", (20, PAGE_BYTES))
        for slot, key in enumerate(keys):
            part = host.cast("B")[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES]
            assert backend.read(key, part).value == "hit"
        assert host.tobytes() == b"".join(page_of(key) for key in keys)

    def test_pages_of_other_types_and_pools(self, backend: StorageBackend) -> None:
        import array

        numbers = array.array("i", range(500))
        keys = [page_key(1, 0), page_key(1, 1), page_key(1, 2**16 - 1)]
        assert backend.write(keys[0], memoryview(numbers))
        for key in keys[1:]:
            assert backend.write(key, memoryview(page_of(key)))
        found = array.array("i", bytes(2000))
        assert backend.read(keys[0], memoryview(found)).value == "hit"
        assert found == numbers
        for key in keys[1:]:
            assert_hit(backend, key)

    def test_what_was_not_written_is_missed(self, backend: StorageBackend) -> None:
        key = page_key(1)
        assert backend.contains([key]) == [False]
        assert read_page(backend, key)[0].value == "miss"
        backend.remove(key)

    def test_a_page_of_another_length_is_no_hit(self, backend: StorageBackend) -> None:
        """The buffer's length is what the reader expects; the key is forgotten."""
        for length in (PAGE_BYTES - 1, PAGE_BYTES + 1):
            key = page_key(length)
            assert backend.write(key, memoryview(page_of(key)))
            assert read_page(backend, key, length)[0].value == "corrupt"
            assert backend.contains([key]) == [False]

    def test_writing_again_keeps_the_page(self, backend: StorageBackend) -> None:
        key = page_key(1)
        assert backend.write(key, memoryview(page_of(key)))
        assert backend.write(key, memoryview(page_of(key)))
        assert_hit(backend, key)

    def test_it_outlives_the_process(self, open_backend: OpenBackend) -> None:
        kept, removed = page_key(1), page_key(2)
        first = open_backend(NAMESPACE)
        for key in (kept, removed):
            assert first.write(key, memoryview(page_of(key)))
        first.remove(removed)
        assert first.flush()
        first.close()
        second = open_backend(NAMESPACE)
        assert second.contains([kept, removed]) == [True, False]
        assert_hit(second, kept)
        second.close()

    def test_namespaces_are_apart(self, open_backend: OpenBackend) -> None:
        key = page_key(1)
        one, other = open_backend(NAMESPACE), open_backend(OTHER)
        assert one.write(key, memoryview(page_of(key)))
        assert other.contains([key]) == [False]
        assert read_page(other, key)[0].value == "miss"
        assert other.clear()
        assert_hit(one, key)

    def test_cleared_is_gone_for_good(self, open_backend: OpenBackend) -> None:
        key, later = page_key(1), page_key(2)
        first = open_backend(NAMESPACE)
        assert first.write(key, memoryview(page_of(key)))
        assert first.flush()
        assert first.clear()
        assert read_page(first, key)[0].value == "miss"
        assert first.write(later, memoryview(page_of(later)))
        first.close()
        second = open_backend(NAMESPACE)
        assert second.contains([key, later]) == [False, True]
        second.close()

    def test_closed_it_misses_and_declines(self, backend: StorageBackend) -> None:
        """Twice closed is closed once; nothing raises afterwards."""
        key = page_key(1)
        assert backend.write(key, memoryview(page_of(key)))
        backend.close()
        backend.close()
        assert read_page(backend, key)[0].value == "miss"
        assert not backend.write(page_key(2), memoryview(page_of(page_key(2))))
        backend.flush()
        backend.remove(key)
        assert all(isinstance(count, int) for count in backend.stats().values())

    def test_threads(self, backend: StorageBackend) -> None:
        keys = [page_key(number) for number in range(12)]
        failures: list[BaseException | str] = []
        hits: list[int] = []

        def work(seed: int) -> None:
            rng, found = random.Random(seed), 0
            try:
                for _ in range(60):
                    key = rng.choice(keys)
                    action = rng.choices(("write", "read", "remove", "flush"), (5, 5, 1, 1))[0]
                    if action == "write":
                        backend.write(key, memoryview(page_of(key)))
                    elif action == "remove":
                        backend.remove(key)
                    elif action == "flush":
                        backend.flush()
                    else:
                        status, found_page = read_page(backend, key)
                        found += status.value == "hit"
                        if status.value == "hit" and found_page != page_of(key):
                            failures.append("wrong bytes")
            except BaseException as error:
                failures.append(error)
            hits.append(found)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert sum(hits) > 0


class EvictionPolicyContract:
    """For entries of ``graft_eviction_policies``. Give a fixture ``policy`` of capacity 8."""

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        """An empty policy, built with ``capacity=8``."""
        raise NotImplementedError("give a fixture `policy`")

    def fill(self, policy: EvictionPolicy) -> list[PageKey]:
        """Eight pages, of rising cost."""
        keys = [page_key(number) for number in range(8)]
        for cost, key in enumerate(keys):
            policy.insert(key, 0.1 + cost, 1000)
        return keys

    def test_evicted_keys_are_its_own(self, policy: EvictionPolicy) -> None:
        keys = self.fill(policy)
        victims = policy.evict(3, lambda key: False)
        assert victims is not None
        assert len(set(victims)) == 3
        assert set(victims) <= set(keys)
        assert len(policy) == 5
        assert not any(key in policy for key in victims)

    def test_protected_keys_stay(self, policy: EvictionPolicy) -> None:
        keys = self.fill(policy)
        protected = set(keys[::2])
        assert set(policy.evict(4, protected.__contains__) or ()) == set(keys[1::2])

    def test_all_or_nothing(self, policy: EvictionPolicy) -> None:
        """Fewer than asked for is None, and changes nothing: the next call is as if it was not."""
        keys = self.fill(policy)
        assert policy.evict(9, lambda key: False) is None
        assert policy.evict(2, lambda key: key != keys[0]) is None
        assert len(policy) == 8
        assert policy.evict(1, lambda key: key != keys[0]) == [keys[0]]

    def test_nothing_asked_nothing_done(self, policy: EvictionPolicy) -> None:
        assert policy.evict(0, lambda key: True) == []
        self.fill(policy)
        assert policy.evict(0, lambda key: True) == []
        assert len(policy) == 8

    def test_unknown_keys_are_ignored(self, policy: EvictionPolicy) -> None:
        keys = self.fill(policy)
        stranger = page_key(99)
        policy.touch(stranger)
        policy.refresh(stranger)
        policy.remove(stranger)
        assert stranger not in policy
        policy.remove(keys[0])
        policy.remove(keys[0])
        assert len(policy) == 7

    def test_inserting_again_keeps_one(self, policy: EvictionPolicy) -> None:
        keys = self.fill(policy)
        policy.insert(keys[3], 5.0, 1000)
        assert len(policy) == 8
        assert set(policy.evict(8, lambda key: False) or ()) == set(keys)

    def test_cleared_it_is_as_new(self, policy: EvictionPolicy) -> None:
        self.fill(policy)
        policy.clear()
        assert len(policy) == 0
        assert policy.evict(1, lambda key: False) is None
        assert len(self.fill(policy)) == len(policy)

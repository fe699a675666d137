"""A third party's store that raises or answers nonsense while the engine runs."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.support.host_cache.third_stores import GoodStore, raising
from vllm_graft.hicache.host.index import Page
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.guarded import guarded
from vllm_graft.hicache.storage.tier.io_threads import Load, Loader, Outcome, WriteBehind
from vllm_graft.testing.contracts.cache_contracts import NAMESPACE, page_key

KEYS = [page_key(number) for number in range(3)]


class PanicException(BaseException):
    """The exception of a panic in Rust, as pyo3 raises it."""


def store(**methods: Callable[..., Any]) -> StorageBackend:
    kind: type[StorageBackend] = type("Third", (GoodStore,), methods)
    return kind(NAMESPACE, {})


ERRORS = [OSError("gone"), SystemExit(3), PanicException("a panic"), GeneratorExit()]
FAULTS = [*map(raising, ERRORS), lambda *_: None]


@pytest.fixture
def loaders() -> Iterator[Callable[[StorageBackend], Loader]]:
    made = []

    def make(backend: StorageBackend) -> Loader:
        made.append(Loader(backend, 2))
        return made[-1]

    yield make
    for loader in made:
        assert loader.close(30)


INTERRUPT = raising(KeyboardInterrupt())


@pytest.mark.parametrize("fault", [*FAULTS, INTERRUPT, lambda *_: "yes", lambda *_: True])
def test_a_load_finishes_whatever_a_read_does(
    loaders: Callable[[StorageBackend], Loader], fault: Callable[..., Any]
) -> None:
    loader = loaders(store(read=fault))
    for key in KEYS:
        load = Load(Page(key, 0), ((key, memoryview(bytearray(8))),))
        loader.submit(load)
        with loader._changed:
            assert loader._changed.wait_for(lambda: loader._finished, 30)
        assert loader.take_finished() == [load]
        assert load.status is ReadStatus.ERROR
    assert all(thread.is_alive() for thread in loader._threads)


SHORT, LONG = (lambda *_: []), (lambda *_: [True] * 99)


@pytest.mark.parametrize("fault", [*FAULTS, SHORT, LONG, lambda *_: 3])
def test_a_lookup_that_fails_is_a_miss_and_counted(fault: Callable[..., Any]) -> None:
    backend = guarded(store(contains=fault))
    assert backend.contains(KEYS) == [False] * 3
    assert backend.failed_lookups == 1


def test_a_lookup_may_answer_with_other_truths() -> None:
    assert guarded(store(contains=lambda *_: (1, None, "x"))).contains(KEYS) == [True, False, True]
    assert guarded(store(contains=lambda *_: iter([1, 1, 0]))).contains(KEYS) == [True, True, False]


@pytest.mark.parametrize("fault", [*FAULTS, INTERRUPT])
def test_a_write_finishes_whatever_the_store_does(fault: Callable[..., Any]) -> None:
    writer = WriteBehind(store(write=fault, flush=fault), 1, 10)
    writer._last_flush = -100.0
    for slot_number, key in enumerate(KEYS):
        assert writer.submit((Page(key, slot_number), ((key, memoryview(b"page")),)))
    assert writer.close(30)
    assert [outcome for _, outcome in writer.take_finished()] == [Outcome.FAILED] * 3
    assert writer.failed_flushes >= 1


@pytest.mark.parametrize("fault", FAULTS)
def test_other_calls_raise_nothing(
    fault: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    backend = guarded(store(remove=fault, clear=fault, close=fault, stats=fault))
    for _ in range(5):
        backend.remove(KEYS[0])
        assert backend.clear() is False
        backend.close()
        assert backend.stats() == {}
    assert caplog.text.count("raised in clear()") == (fault is not FAULTS[-1])


def test_a_signal_s_exit_is_not_the_store_s() -> None:
    """vLLM ends its engine by an exception of a handler, which may come within a store's call."""

    def handler(number: int, frame: Any) -> None:
        raise SystemExit

    def contains(self: Any, keys: Sequence[PageKey]) -> list[bool]:
        os.kill(os.getpid(), signal.SIGTERM)
        return [True] * len(keys)

    stock = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SystemExit):
            guarded(store(contains=contains)).contains(KEYS)
    finally:
        signal.signal(signal.SIGTERM, stock)
    with pytest.raises(KeyboardInterrupt):
        guarded(store(contains=raising(KeyboardInterrupt()))).contains(KEYS)

"""Guards calls to a store, so that whatever a third party's store does costs pages and no more."""

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from vllm_graft.base.log import logger
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend

Result = TypeVar("Result")


class Guarded(StorageBackend):
    """A store whose calls neither raise nor return anything else than the interface allows. What a
    call raises first is logged, even if it is no ``Exception``: a panic in Rust, or ``SystemExit``.
    A lookup that fails says that the store has no page, a read is an ERROR, and a write is not
    kept. Callers count failures, but for those of lookups: ``failed_lookups``."""

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        self.failed_lookups = 0
        self._told: set[str] = set()

    @property
    def is_full(self) -> bool:
        return self._truth("full", lambda: self._backend.full)

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        found = self._call("contains", lambda: [bool(one) for one in self._backend.contains(keys)])
        if found is not None and len(found) == len(keys):
            return found
        self.failed_lookups += 1
        return [False] * len(keys)

    def read(self, key: PageKey, buffer: memoryview) -> ReadStatus:
        status = self._call("read", self._backend.read, key, buffer)
        return status if isinstance(status, ReadStatus) else ReadStatus.ERROR

    def write(self, key: PageKey, page: memoryview) -> bool:
        return self._truth("write", self._backend.write, key, page)

    def remove(self, key: PageKey) -> None:
        self._call("remove", self._backend.remove, key)

    def flush(self) -> bool:
        return self._truth("flush", self._backend.flush)

    def clear(self) -> bool:
        return self._truth("clear", self._backend.clear)

    def close(self) -> None:
        self._call("close", self._backend.close)

    def stats(self) -> dict[str, int]:
        return self._call("stats", self._backend.stats) or {}

    def _truth(self, name: str, method: Callable[..., Any], *given: Any) -> bool:
        return bool(self._call(name, lambda: bool(method(*given))))

    def _call(self, name: str, method: Callable[..., Result], *given: Any) -> Result | None:
        try:
            return method(*given)
        except BaseException as error:
            if _is_of_a_signal(error):
                raise
            if name not in self._told:
                self._told.add(name)
                logger.exception("A storage backend raised in %s(); this is told once.", name)
            return None


def guarded(backend: StorageBackend) -> Guarded:
    """Guard a store, unless it is guarded."""
    return backend if isinstance(backend, Guarded) else Guarded(backend)


def _is_of_a_signal(error: BaseException) -> bool:
    """Whether a signal's handler has raised, and by chance within the store's call. vLLM's engine
    ends by a ``SystemExit`` of its handler. Handlers run on the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = (signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT))
    codes = {getattr(handler, "__code__", None) for handler in handlers}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False

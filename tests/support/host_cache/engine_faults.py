"""Faults of an engine's disk and of its copies."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tests.support.host_cache.faults import Faults, FaultyFiles
from vllm_graft.hicache import setup
from vllm_graft.hicache.copies.copy_engine import MemoryCopyEngine
from vllm_graft.hicache.messages.operation import CacheOperation


@contextlib.contextmanager
def injected(faults: Faults) -> Iterator[None]:
    """Let an engine of this process run into faults of its disk and of its copies.

    A copy that is tried again after a fault goes well.
    """
    make_backend, copies = setup.make_backend, MemoryCopyEngine._copies
    failed: set[int] = set()

    def faulty_backend(*given: Any) -> Any:
        backend: Any = make_backend(*given)
        backend.files = FaultyFiles(faults)
        return backend

    def faulty_copies(engine: MemoryCopyEngine, operation: CacheOperation) -> Any:
        if operation.ids[0] in failed:
            return copies(engine, operation)
        kind = faults.decide("copy", ("slow", "short", "failing"))
        if kind in ("short", "failing"):
            failed.add(operation.ids[0])
            raise faults.error("copy")
        faults.delay_or_kill(kind)
        return copies(engine, operation)

    with (
        mock.patch.object(setup, "make_backend", faulty_backend),
        mock.patch.object(MemoryCopyEngine, "_copies", faulty_copies),
    ):
        yield

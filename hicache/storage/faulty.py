"""Injects faults into a store: into its system calls, and into its results."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_graft.hicache.faults.injector import FaultInjector, FaultKind, InjectedFault
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.files import Buffer, Files


class FaultyFiles(Files):
    """System calls of which the injector lets some go wrong."""

    _KINDS = tuple(FaultKind)

    def __init__(self, injector: FaultInjector, files: Files | None = None) -> None:
        self._injector = injector
        self._files = files if files is not None else Files()

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        kind = self._start("pread")
        if kind is FaultKind.SHORT:
            buffers = self._shorten([memoryview(buffer) for buffer in buffers])
        done = self._files.preadv(fd, buffers, offset) if buffers else 0
        if kind is FaultKind.CORRUPT:
            self._injector.spoil(buffers[self._injector.below(len(buffers))])
        return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        kind = self._start("pwrite", early_kill=False)
        if kind in (FaultKind.SHORT, FaultKind.KILLED):
            # It may shorten to nothing. Files.write treats that as an error, like a full disk.
            buffers = self._shorten(list(buffers))
        elif kind is FaultKind.CORRUPT:
            buffers = [memoryview(bytearray(buffer)) for buffer in buffers]
            self._injector.spoil(buffers[self._injector.below(len(buffers))])
        done = self._files.pwritev(fd, buffers, offset) if buffers else 0
        if kind is FaultKind.KILLED:
            self._injector.delay_or_kill(kind)
        return done

    def fdatasync(self, fd: int) -> None:
        self._start("fdatasync")
        self._files.fdatasync(fd)

    def _start(self, site: str, early_kill: bool = True) -> FaultKind | None:
        kind = self._injector.decide(site, self._KINDS)
        if kind is FaultKind.FAILING:
            raise InjectedFault(self._injector.choose_errno(), f"injected at {site}")
        if kind is not FaultKind.KILLED or early_kill:
            self._injector.delay_or_kill(kind)
        return kind

    def _shorten(self, buffers: list[memoryview]) -> list[memoryview]:
        """A random number of the first bytes of ``buffers``, possibly none."""
        left = self._injector.below(sum(buffer.nbytes for buffer in buffers) or 1)
        short = []
        for buffer in buffers:
            if left:
                short.append(buffer[:left])
                left -= short[-1].nbytes
        return short


class FaultyBackend(StorageBackend):
    """A store of whose operations the injector lets some go wrong, as any store's may."""

    _KINDS = (FaultKind.SLOW, FaultKind.SHORT, FaultKind.CORRUPT, FaultKind.FAILING)

    def __init__(self, backend: StorageBackend, injector: FaultInjector) -> None:
        super().__init__(backend.namespace, {})
        self._backend = backend
        self._injector = injector

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return self._backend.contains(keys)

    def read(self, key: PageKey, buffer: memoryview) -> ReadStatus:
        kind = self._injector.decide("read", self._KINDS)
        self._injector.delay_or_kill(kind)
        status = self._backend.read(key, buffer)
        if kind in (None, FaultKind.SLOW) or status is not ReadStatus.HIT:
            return status
        self._backend.remove(key)
        self._injector.spoil(buffer)
        return ReadStatus.ERROR if kind is FaultKind.FAILING else ReadStatus.CORRUPT

    def write(self, key: PageKey, page: memoryview) -> bool:
        kind = self._injector.decide("write", (FaultKind.SLOW, FaultKind.FAILING))
        self._injector.delay_or_kill(kind)
        return kind is not FaultKind.FAILING and self._backend.write(key, page)

    def remove(self, key: PageKey) -> None:
        self._backend.remove(key)

    def flush(self) -> bool:
        kind = self._injector.decide("flush", (FaultKind.SLOW, FaultKind.FAILING))
        self._injector.delay_or_kill(kind)
        return self._backend.flush() and kind is not FaultKind.FAILING

    def clear(self) -> bool:
        """Pass the call on unchanged, because a fault here could bring old pages back."""
        return self._backend.clear()

    def close(self) -> None:
        self._backend.close()

    def stats(self) -> dict[str, int]:
        """The store's counters, and the injector's as ``fault_<name>``."""
        faults = self._injector.counters.snapshot()
        return self._backend.stats() | {f"fault_{name}": n for name, n in faults.items()}


def inject(backend: StorageBackend, injector: FaultInjector) -> StorageBackend:
    """Let the injector act on an open store's system calls and on its results."""
    files = getattr(backend, "files", None)
    if isinstance(files, Files):
        backend.files = FaultyFiles(injector, files)  # type: ignore[attr-defined]
    return FaultyBackend(backend, injector)

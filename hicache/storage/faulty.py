"""Faults on purpose, seeded: what a disk, a network mount or a copy engine may do to a cache.

Turned on by ``"faults": {"seed": 1, "rate": 0.01, "kinds": ["corrupt", "failing"]}``. They are
injected below the checksums, at the system calls of a store that has ``files``, so that what guards
the engine's tokens is what is tested. Above them, :class:`FaultyBackend` makes any store slow or
failing, and copies go through :meth:`FaultInjector.before`.
"""

from __future__ import annotations

import enum
import errno
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from vllm_graft.base.log import logger
from vllm_graft.hicache.config.connector_options import Options
from vllm_graft.hicache.storage.backend import Counters, PageKey, ReadStatus, StorageBackend
from vllm_graft.hicache.storage.files import Buffer, Files


class FaultKind(enum.Enum):
    """What goes wrong."""

    SLOW = "slow"
    """The operation takes ``slow_seconds`` longer."""

    SHORT = "short"
    """A read or write moves fewer bytes than it was asked to; a read may meet the end early."""

    CORRUPT = "corrupt"
    """A bit flips, or a part is zero, in what is read or written."""

    FAILING = "failing"
    """The operation fails: EIO, ENOSPC or EROFS."""

    KILLED = "killed"
    """The process gets SIGKILL in mid-operation. Never unless it is named."""


class FaultOptions(Options):
    """Keys of ``faults``."""

    seed: int = 0
    """Which faults: the same seed and order of operations give the same ones."""

    rate: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the operations that go wrong."""

    kinds: tuple[FaultKind, ...] = (
        FaultKind.SLOW,
        FaultKind.SHORT,
        FaultKind.CORRUPT,
        FaultKind.FAILING,
    )
    """Which may occur, each as often as the others."""

    slow_seconds: Annotated[float, Field(ge=0, le=60)] = 0.1
    """How long a slow operation sleeps."""


class InjectedFault(OSError):
    """Raised in place of what the medium or the copy engine would have raised."""


class FaultInjector:
    """Decides, and counts in :attr:`counters`: ``<site>_<kind>``, and ``injected`` in all."""

    def __init__(self, options: FaultOptions) -> None:
        self.options = options
        self.counters = Counters()
        self._random = random.Random(options.seed)
        self._lock = threading.Lock()
        if options.rate and options.kinds:
            logger.warning("Faults are injected into the host KV cache: %s.", options)

    def decide(self, site: str, kinds: Sequence[FaultKind]) -> FaultKind | None:
        """Whether the next operation at ``site`` goes wrong, and how; only ``kinds`` can there."""
        possible = [kind for kind in self.options.kinds if kind in kinds]
        with self._lock:
            if not possible or self._random.random() >= self.options.rate:
                return None
            kind = self._random.choice(possible)
        self.counters.add("injected")
        self.counters.add(f"{site}_{kind.value}")
        return kind

    def before(self, site: str) -> None:
        """Go wrong, perhaps, before an operation that reports failures by raising.

        Never corrupts: bytes in host memory are past the checksums.

        Raises:
            InjectedFault: for a failing or a short operation.
        """
        kinds = (FaultKind.SLOW, FaultKind.SHORT, FaultKind.FAILING, FaultKind.KILLED)
        kind = self.decide(site, kinds)
        if kind in (FaultKind.SHORT, FaultKind.FAILING):
            raise InjectedFault(self.choose_errno(), f"injected at {site}")
        self.delay_or_kill(kind)

    def delay_or_kill(self, kind: FaultKind | None) -> None:
        """Carry out a slow or killed operation's fault."""
        if kind is FaultKind.SLOW:
            time.sleep(self.options.slow_seconds)
        elif kind is FaultKind.KILLED:
            os.kill(os.getpid(), signal.SIGKILL)

    def choose_errno(self) -> int:
        """One of the errors that a medium gives."""
        with self._lock:
            return self._random.choice((errno.EIO, errno.ENOSPC, errno.EROFS))

    def below(self, bound: int) -> int:
        """A number in 0..bound-1."""
        with self._lock:
            return self._random.randrange(bound)

    def spoil(self, buffer: Buffer) -> None:
        """Change bytes: a flipped bit, or zeros from somewhere to the end."""
        view = memoryview(buffer).cast("B")
        if not view.nbytes:
            return
        position = self.below(view.nbytes)
        if self.below(2):
            view[position] ^= 1 << self.below(8)
        else:
            view[position:] = bytes(view.nbytes - position)


class FaultyFiles(Files):
    """System calls that go wrong at times."""

    _KINDS = tuple(FaultKind)

    def __init__(self, injector: FaultInjector) -> None:
        self._injector = injector

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Read some bytes, perhaps wrong ones, perhaps none."""
        kind = self._start("pread")
        if kind is FaultKind.SHORT:
            buffers = self._shorten([memoryview(buffer) for buffer in buffers])
        done = super().preadv(fd, buffers, offset) if buffers else 0
        if kind is FaultKind.CORRUPT:
            self._injector.spoil(buffers[self._injector.below(len(buffers))])
        return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write some bytes, perhaps wrong ones."""
        kind = self._start("pwrite", early_kill=False)
        if kind in (FaultKind.SHORT, FaultKind.KILLED):
            # A write that moved nothing is an error to Files.write, as a full disk's would be.
            buffers = self._shorten(list(buffers))
        elif kind is FaultKind.CORRUPT:
            buffers = [memoryview(bytearray(buffer)) for buffer in buffers]
            self._injector.spoil(buffers[self._injector.below(len(buffers))])
        done = super().pwritev(fd, buffers, offset) if buffers else 0
        if kind is FaultKind.KILLED:
            self._injector.delay_or_kill(kind)
        return done

    def fdatasync(self, fd: int) -> None:
        """Make bytes durable, or fail to."""
        self._start("fdatasync")
        super().fdatasync(fd)

    def _start(self, site: str, early_kill: bool = True) -> FaultKind | None:
        kind = self._injector.decide(site, self._KINDS)
        if kind is FaultKind.FAILING:
            raise InjectedFault(self._injector.choose_errno(), f"injected at {site}")
        if kind is not FaultKind.KILLED or early_kill:
            self._injector.delay_or_kill(kind)
        return kind

    def _shorten(self, buffers: list[memoryview]) -> list[memoryview]:
        """The first bytes of ``buffers``, down to none."""
        left = self._injector.below(sum(buffer.nbytes for buffer in buffers) or 1)
        short = []
        for buffer in buffers:
            if left:
                short.append(buffer[:left])
                left -= short[-1].nbytes
        return short


class FaultyBackend(StorageBackend):
    """A store whose answers go wrong at times, never in a way that a right store's could not.

    Args:
        backend: the store.
        injector: shared with the other parts.
    """

    _KINDS = (FaultKind.SLOW, FaultKind.SHORT, FaultKind.CORRUPT, FaultKind.FAILING)

    def __init__(self, backend: StorageBackend, injector: FaultInjector) -> None:
        super().__init__(backend.namespace, {})
        self._backend = backend
        self._injector = injector

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """As the store says."""
        return self._backend.contains(keys)

    def read(self, key: PageKey, buffer: memoryview) -> ReadStatus:
        """As the store; or late; or garbage that is reported; or an error."""
        kind = self._injector.decide("read", self._KINDS)
        self._injector.delay_or_kill(kind)
        status = self._backend.read(key, buffer)
        if kind in (None, FaultKind.SLOW) or status is not ReadStatus.HIT:
            return status
        self._backend.remove(key)
        self._injector.spoil(buffer)
        return ReadStatus.ERROR if kind is FaultKind.FAILING else ReadStatus.CORRUPT

    def write(self, key: PageKey, page: memoryview) -> bool:
        """As the store; or late; or declined."""
        kind = self._injector.decide("write", (FaultKind.SLOW, FaultKind.FAILING))
        self._injector.delay_or_kill(kind)
        return kind is not FaultKind.FAILING and self._backend.write(key, page)

    def remove(self, key: PageKey) -> None:
        """As the store."""
        self._backend.remove(key)

    def flush(self) -> bool:
        """As the store; or late; or refused."""
        kind = self._injector.decide("flush", (FaultKind.SLOW, FaultKind.FAILING))
        self._injector.delay_or_kill(kind)
        return self._backend.flush() and kind is not FaultKind.FAILING

    def clear(self) -> bool:
        """As the store: what must not be seen again is not played with."""
        return self._backend.clear()

    def close(self) -> None:
        """As the store."""
        self._backend.close()

    def stats(self) -> dict[str, int]:
        """The store's, and the injector's as ``fault_<name>``."""
        faults = self._injector.counters.snapshot()
        return self._backend.stats() | {f"fault_{name}": n for name, n in faults.items()}


def inject(backend: StorageBackend, injector: FaultInjector) -> StorageBackend:
    """Put faults under and above an open store."""
    if isinstance(getattr(backend, "files", None), Files):
        backend.files = FaultyFiles(injector)  # type: ignore[attr-defined]
    return FaultyBackend(backend, injector)

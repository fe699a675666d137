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

from vllm_graft.base.counters import Counters
from vllm_graft.base.log import logger
from vllm_graft.hicache.config.connector_options import Options


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

    def spoil(self, buffer: memoryview | bytearray) -> None:
        """Change bytes: a flipped bit, or zeros from somewhere to the end."""
        view = memoryview(buffer).cast("B")
        if not view.nbytes:
            return
        position = self.below(view.nbytes)
        if self.below(2):
            view[position] ^= 1 << self.below(8)
        else:
            view[position:] = bytes(view.nbytes - position)

"""Injects faults such as a disk, a network mount or a copy engine may cause. They are seeded.

``VLLM_GRAFT_FAULTS='{"seed": 1, "rate": 0.01, "kinds": ["corrupt", "failing"]}'`` turns them on.
Faults of storage are injected below the checksums that protect the engine's tokens, in stores that
have the attribute ``files``. Above the checksums, ``hicache.storage.faulty.FaultyBackend`` makes
any store slow or failing. Copies go through :meth:`FaultInjector.before`.
"""

from __future__ import annotations

import enum
import errno
import json
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
from vllm_graft.base.options import Section, parse

FAULTS = "VLLM_GRAFT_FAULTS"
"""Environment variable with `FaultOptions` as JSON."""


class FaultKind(enum.Enum):
    """Kinds of faults."""

    SLOW = "slow"
    """The operation takes ``slow_seconds`` longer."""

    SHORT = "short"
    """A read or write moves fewer bytes than it should."""

    CORRUPT = "corrupt"
    """One bit flips, or the rest is zero, in the bytes that are read or written."""

    FAILING = "failing"
    """The operation fails with EIO, ENOSPC or EROFS."""

    KILLED = "killed"
    """The process gets SIGKILL during the operation. It is not among the default kinds."""


class FaultOptions(Section):
    """Keys of what the environment variable holds."""

    seed: int = 0
    """Seed of the faults. The same seed and the same order of operations give the same faults."""

    rate: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Fraction of the operations that go wrong."""

    kinds: tuple[FaultKind, ...] = tuple(kind for kind in FaultKind if kind is not FaultKind.KILLED)
    """Kinds that may occur, all equally often."""

    slow_seconds: Annotated[float, Field(ge=0, le=60)] = 0.1
    """Seconds that a slow operation sleeps."""


def asked_for() -> FaultOptions | None:
    """The faults that the environment asks for, or None; ConfigError if it holds other keys."""
    text = os.environ.get(FAULTS)
    if not text:
        return None
    try:
        values = json.loads(text)
    except ValueError:
        values = text
    return parse(FaultOptions, values, FAULTS)


class InjectedFault(OSError):
    """The error of an injected failure of a medium or a copy engine."""


class FaultInjector:
    """Decides which operations go wrong.

    It counts faults as ``<site>_<kind>``, and all of them as ``injected``.
    """

    def __init__(self, options: FaultOptions) -> None:
        self.options = options
        self.counters = Counters()
        self._random = random.Random(options.seed)
        self._lock = threading.Lock()
        if options.rate and options.kinds:
            logger.warning("Faults are injected into the host KV cache: %s.", options)

    def decide(self, site: str, kinds: Sequence[FaultKind]) -> FaultKind | None:
        """Choose one of ``kinds`` for the next operation at ``site``; None if it goes well."""
        possible = [kind for kind in self.options.kinds if kind in kinds]
        with self._lock:
            if not possible or self._random.random() >= self.options.rate:
                return None
            kind = self._random.choice(possible)
        self.counters.add("injected")
        self.counters.add(f"{site}_{kind.value}")
        return kind

    def before(self, site: str) -> None:
        """Call this before an operation that raises if it fails; the fault happens here.

        It never corrupts bytes, because bytes in host memory have passed their checksums. A failing
        or a short operation raises InjectedFault.
        """
        kinds = (FaultKind.SLOW, FaultKind.SHORT, FaultKind.FAILING, FaultKind.KILLED)
        kind = self.decide(site, kinds)
        if kind in (FaultKind.SHORT, FaultKind.FAILING):
            raise InjectedFault(self.choose_errno(), f"injected at {site}")
        self.delay_or_kill(kind)

    def delay_or_kill(self, kind: FaultKind | None) -> None:
        if kind is FaultKind.SLOW:
            time.sleep(self.options.slow_seconds)
        elif kind is FaultKind.KILLED:
            os.kill(os.getpid(), signal.SIGKILL)

    def choose_errno(self) -> int:
        """A random error number of a medium."""
        with self._lock:
            return self._random.choice((errno.EIO, errno.ENOSPC, errno.EROFS))

    def below(self, bound: int) -> int:
        with self._lock:
            return self._random.randrange(bound)

    def spoil(self, buffer: memoryview | bytearray) -> None:
        """Corrupt a buffer: flip one bit, or write zeros from some place to the end."""
        view = memoryview(buffer).cast("B")
        if not view.nbytes:
            return
        position = self.below(view.nbytes)
        if self.below(2):
            view[position] ^= 1 << self.below(8)
        else:
            view[position:] = bytes(view.nbytes - position)

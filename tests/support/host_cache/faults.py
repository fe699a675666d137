"""Faults such as a disk, a network mount or a copy engine may cause. They are seeded.

Those of a disk happen in a store's system calls, below the checksums that protect tokens. Processes
that only write pages start in a moment: nothing here imports torch or vLLM.
"""

import errno
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence

from vllm_graft.hicache.storage.files import Buffer, Files

KINDS = ("slow", "short", "corrupt", "failing")
"""The kinds that occur unless others are named. There is also ``killed``, a SIGKILL."""


class Faults:
    """Decides which operations go wrong; counts ``<site>_<kind>``, and all as ``injected``."""

    def __init__(
        self,
        rate: float,
        seed: int = 7,
        kinds: Sequence[str] = KINDS,
        slow_seconds: float = 0.0,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._rate, self._kinds, self._slow_seconds = rate, tuple(kinds), slow_seconds
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def decide(self, site: str, kinds: Sequence[str]) -> str | None:
        """Choose one of ``kinds`` for the next operation at a site; None if it goes well."""
        possible = [kind for kind in self._kinds if kind in kinds]
        with self._lock:
            if not possible or self._random.random() >= self._rate:
                return None
            kind = self._random.choice(possible)
            self.counts.update(("injected", f"{site}_{kind}"))
        return kind

    def error(self, site: str) -> OSError:
        with self._lock:
            return OSError(
                self._random.choice((errno.EIO, errno.ENOSPC, errno.EROFS)), f"injected at {site}"
            )

    def delay_or_kill(self, kind: str | None) -> None:
        if kind == "slow":
            time.sleep(self._slow_seconds)
        elif kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    def below(self, bound: int) -> int:
        with self._lock:
            return self._random.randrange(bound)

    def spoil(self, buffer: Buffer) -> None:
        """Flip one bit of a buffer, or write zeros from some place to the end."""
        view = memoryview(buffer).cast("B")
        if not view.nbytes:
            return
        position = self.below(view.nbytes)
        if self.below(2):
            view[position] ^= 1 << self.below(8)
        else:
            view[position:] = bytes(view.nbytes - position)

    def shorten(self, buffers: Sequence[Buffer]) -> list[memoryview]:
        """A random number of the first bytes of ``buffers``, possibly none."""
        views = [memoryview(buffer) for buffer in buffers]
        left, short = self.below(sum(view.nbytes for view in views) or 1), []
        for view in views:
            if left:
                short.append(view[:left])
                left -= short[-1].nbytes
        return short


class FaultyFiles(Files):
    """System calls of which some go wrong."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        kind = self._start("pread")
        if kind == "short":
            buffers = self._faults.shorten(buffers)
        done = super().preadv(fd, buffers, offset) if buffers else 0
        if kind == "corrupt":
            self._faults.spoil(buffers[self._faults.below(len(buffers))])
        return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        kind = self._start("pwrite", early_kill=False)
        if kind in ("short", "killed"):
            # It may shorten to nothing. Files.write treats that as an error, like a full disk.
            buffers = self._faults.shorten(buffers)
        elif kind == "corrupt":
            buffers = [memoryview(bytearray(buffer)) for buffer in buffers]
            self._faults.spoil(buffers[self._faults.below(len(buffers))])
        done = super().pwritev(fd, buffers, offset) if buffers else 0
        if kind == "killed":
            self._faults.delay_or_kill(kind)
        return done

    def fdatasync(self, fd: int) -> None:
        # A sync has nothing to shorten or to spoil.
        self._start("fdatasync", ("slow", "failing", "killed"))
        super().fdatasync(fd)

    def _start(
        self, site: str, kinds: Sequence[str] = (*KINDS, "killed"), early_kill: bool = True
    ) -> str | None:
        kind = self._faults.decide(site, kinds)
        if kind == "failing":
            raise self._faults.error(site)
        if kind != "killed" or early_kill:
            self._faults.delay_or_kill(kind)
        return kind

"""The slots of a pool that several engines share: which page is in each, who fills and who reads
it. All of it lies behind the pages, in the same region.

Two things keep it right whatever instruction a process dies at. What several engines may change is
changed under one lock, and the last write of each change is a single number: a slot's state. And
each process of an engine keeps a lock on its engine's row, so the slots and pins of a row that
nobody locks are nobody's. There is nothing to repair.

======= ==================================================== =======================================
state   meaning                                              who ends it
======= ==================================================== =======================================
FREE    holds nothing                                        who has the lock
FILLING its owner's copies may write to it                   its owner, without the lock
READY   every rank has reported its copy; pages may be read  who has the lock, unless it is pinned
GONE    as READY, but nobody finds the page any more         who has the lock, unless it is pinned
======= ==================================================== =======================================

An engine takes back its own pins without the lock.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.base.locks import ByteLocks
from vllm_graft.hicache.config.cache_config import flag

Array = NDArray[np.int64]

FREE, FILLING, READY, GONE = range(4)

OWNERS = 32
"""Most engines that share a pool at a time."""

RECORD_BYTES = 84
"""Bytes that name a page: namespace 16, hash 64, pool 2, the hash's length 1, none 1."""

HEAD_BYTES = 64
"""The last bytes of the region: int64 numbers, of which these are used."""
HOST_BYTES, GIVEN, USES = range(3)

PATIENCE = 0.005
"""Most seconds that a call waits for the lock. Its holder keeps it for less than that, unless it
was stopped. Then each call tries once, until one has had it."""

JOIN_SECONDS = 30.0
"""Most seconds that an engine which starts waits for the lock, and for a row."""

CARE_SECONDS = 1.0
"""Seconds between two looks at who is dead."""

GRACE_SECONDS = 2.0
"""Seconds for which what a dead engine was filling is left alone, because its device may still copy
to it while the driver ends it."""

WINDOW = 1 << 14
"""Slots that a search for free ones looks at first. Raised, a pool with many takes longer."""

_MUTEX, _ROW = 0, 1
_SCHEDULER = _ROW + OWNERS
"""Bytes of the region's file that are locked: all changes, and each row, by all processes of its
engine and by its scheduler."""


def control_bytes(num_slots: int) -> int:
    """Bytes that the slots' control takes, a multiple of 8."""
    size = sum(np.dtype(kind).itemsize * int(np.prod(of)) for _, kind, of in _arrays(num_slots))
    return -(-size // HEAD_BYTES) * HEAD_BYTES + HEAD_BYTES


def _arrays(num_slots: int) -> tuple[tuple[str, type, tuple[int, ...]], ...]:
    return (
        ("used", np.int64, (num_slots,)),
        ("log", np.int64, (num_slots,)),
        ("engines", np.uint8, (OWNERS, 16)),
        ("records", np.uint8, (num_slots, RECORD_BYTES)),
        ("owner", np.uint8, (num_slots,)),
        ("state", np.uint8, (num_slots,)),
        ("pins", np.uint8, (OWNERS, num_slots)),
    )


class SharedSlots:
    """The control of a pool's slots, of which zeroes are the beginning. ``memory`` has
    :func:`control_bytes`, ``engine`` is the id (16 bytes) of the engine that this process is of.

    Attributes:
        row: number of the engine among :data:`OWNERS`.
        alive: number of engines that share the pool, this one included, when it was last seen to.
        waits: how often the lock was another engine's.
        given_up: how often it could not be had within :data:`PATIENCE`.
        evicted: number of pages that this process has evicted.
        reaped: number of dead engines whose slots it has given back.

    Raises:
        GraftError: if the lock can't be had, or as many engines as there are rows live.
    """

    used: Array  # The number of a slot's last use, of all uses; 0 for what nobody wants.
    log: Array  # A ring of the slots that were given to pages, in order.
    engines: NDArray[np.uint8]  # The ids of the rows' engines.
    records: NDArray[np.uint8]  # What names the page of each slot.
    owner: NDArray[np.uint8]  # 1 + the row that has filled a slot; 0 if that is dead.
    state: NDArray[np.uint8]
    pins: NDArray[np.uint8]  # 1 where a row's copies read a slot's page.

    def __init__(
        self,
        memory: memoryview,
        num_slots: int,
        locks: ByteLocks,
        engine: bytes,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.num_slots = num_slots
        self.alive = 1
        self.waits = self.given_up = self.evicted = self.reaped = 0
        begin = 0
        for name, kind, of in _arrays(num_slots):
            count = int(np.prod(of))
            array: NDArray[Any] = np.frombuffer(memory, kind, count, begin).reshape(of)
            setattr(self, name, array)
            begin += array.nbytes
        self.head = np.frombuffer(memory, np.int64, HEAD_BYTES // 8, len(memory) - HEAD_BYTES)
        self._locks, self._clock = locks, clock
        self._patience, self._cared = PATIENCE, 0
        # Rows that were dead at the last look, with their engines, and since when. Others' clocks
        # say nothing here: a container may have a time namespace of its own.
        self._dead: dict[tuple[int, bytes], int] = {}
        self._oldest: tuple[Array, Array] = (np.empty(0, np.int64), np.empty(0, np.int64))
        self._cursor = 0
        self.row = -1
        self.row = self._join(engine)

    @contextlib.contextmanager
    def locked(self, seconds: float | None = None) -> Iterator[bool]:
        """Keep all other engines from changes inside; yields whether the lock could be had."""
        end = time.monotonic() + (self._patience if seconds is None else seconds)
        if not (had := self._locks.take(_MUTEX)):
            self.waits += 1
            while not had and time.monotonic() < end:
                time.sleep(5e-5)
                had = self._locks.take(_MUTEX)
            self.given_up += not had
        self._patience = PATIENCE if had else 0
        try:
            if had and self.care_is_due:
                self.care()
            yield had
        finally:
            if had:
                self._locks.free(_MUTEX)

    @property
    def care_is_due(self) -> bool:
        return self._clock() - self._cared > CARE_SECONDS * 1e9

    def claim_scheduler(self) -> None:
        """Say that this process has the engine's scheduler, of which there is one."""
        if not self._locks.take(_SCHEDULER + self.row):
            raise GraftError(
                "another engine was started with the same VllmConfig. Make one for each engine."
            )

    @property
    def accompanied(self) -> bool:
        """Whether another process of the engine, as its ranks, has this region mapped as well."""
        return self._locks.elsewhere(_ROW + self.row)

    # What needs the lock.

    def care(self) -> None:
        """Note which rows are dead, and give back what those had that are dead for a while."""
        seen, self._dead = self._dead, {}
        self._cared, self.alive = (now := self._clock()), 0
        for row in self._rows():
            if row == self.row or self._locks.elsewhere(_ROW + row):
                self.alive += 1
                continue
            self.pins[row] = 0
            engine = row, self.engines[row].tobytes()
            self._dead[engine] = seen.get(engine, now)
            if now - self._dead[engine] > GRACE_SECONDS * 1e9:
                of_row = np.flatnonzero(self.owner == row + 1)
                self.state[of_row[self.state[of_row] == FILLING]] = FREE
                self.owner[of_row] = 0
                self.engines[row] = 0
                self.reaped += 1

    def take(self, count: int) -> Array | None:
        """``count`` free slots, ascending, in few ranges; others are evicted if there are not so
        many. None if too many are pinned or being filled."""
        free = self._free(count)
        if (short := count - len(free)) > 0:
            evicted = self._evict(short)
            if evicted is None:
                return None
            free = np.sort(np.concatenate((free, evicted)))
        return free[:count] if count in (1, len(free)) else _ranges(free, count)

    def fill(self, slots: Array, records: NDArray[np.uint8]) -> None:
        """Give free slots to pages that this engine will write, named by ``[len(slots), 84]``."""
        self.records[slots] = records
        self.owner[slots] = self.row + 1
        self.use(slots)
        given = int(self.head[GIVEN])
        # In this order: who reads the log may look at a slot for nothing, but misses none.
        self.head[GIVEN] = given + len(slots)
        self.log[(given + np.arange(len(slots))) % self.num_slots] = slots
        self.state[slots] = FILLING

    def pin(self, slots: Array) -> bool:
        """Keep ready pages until :meth:`unpin`; False, with nothing pinned, if one is not ready."""
        if (self.state[slots] != READY).any():
            return False
        self.pins[self.row, slots] = 1
        return True

    def drop(self, slots: Array) -> None:
        """Let nobody find these ready pages any more. They leave first."""
        self.used[slots] = 0
        self.state[slots] = GONE

    # What an engine does to what it fills and pins itself, without the lock.

    def complete(self, slots: Array) -> None:
        """Make pages ready that this engine has filled, of which the first shall leave last."""
        self.use(slots[::-1])
        self.state[slots] = READY

    def abandon(self, slots: Array) -> None:
        """Free slots that this engine was filling, and that no copy writes to any more."""
        self.state[slots] = FREE

    def unpin(self, slots: Array) -> None:
        self.pins[self.row, slots] = 0

    def use(self, slots: Array) -> None:
        """Note that pages are used now, the one that shall leave first in front."""
        last = int(self.head[USES])
        self.head[USES] = last + len(slots)
        self.used[slots] = last + 1 + np.arange(len(slots))

    def close(self) -> None:
        """Let go of the memory. The row is another's once all processes of the engine have. What
        comes later, as the end of a read that hangs, changes nothing."""
        for name in ("head", *(name for name, _, _ in _arrays(0))):
            setattr(self, name, np.zeros_like(getattr(self, name)))

    def _join(self, engine: bytes) -> int:
        end = time.monotonic() + JOIN_SECONDS
        own = np.frombuffer(engine, np.uint8)
        while True:
            with self.locked(JOIN_SECONDS) as had:
                if not had:
                    raise GraftError(
                        f"the shared host memory's lock was not had in {JOIN_SECONDS:.0f} s: a "
                        "server that shares it is stopped (SIGSTOP). Continue or end it."
                    )
                mine = np.flatnonzero((self.engines == own).all(axis=1))
                rows = [row for row in mine if self._locks.elsewhere(_ROW + row)]
                for row in map(int, rows or np.flatnonzero(~self.engines.any(axis=1))):
                    self._locks.take(_ROW + row, shared=True)
                    self.engines[row] = own
                    self._cared = 0
                    return row
                self.care()
            if time.monotonic() > end:
                raise ConfigError(
                    f"{flag('shared')}: {OWNERS} engines share this host memory already, and no "
                    f"more can: give this one {flag('shared')}=false."
                )
            time.sleep(0.1)

    def _rows(self) -> list[int]:
        """The rows that are taken."""
        return [int(row) for row in np.flatnonzero(self.engines.any(axis=1))]

    def _free(self, count: int) -> Array:
        """``count`` free slots or more, or all that there are."""
        begin = self._cursor
        free = np.flatnonzero(self.state[begin : begin + WINDOW] == FREE) + begin
        if len(free) < count:
            free = np.flatnonzero(self.state == FREE)
            self._cursor = int(free[0]) if len(free) else 0
        return free

    def _evict(self, count: int) -> Array | None:
        """Free the ``count`` pages that nobody has used for the longest time."""
        slots, stamps = self._oldest
        # Pages that were used since the last search are not the oldest any more.
        some = slots[: 2 * count + 16]
        still = (self.state[some] >= READY) & (self.used[some] == stamps[: len(some)])
        found: Array = some[still & ~self.pins[:, some].any(axis=0)][:count]
        if len(found) == count:
            last = int(np.flatnonzero(slots == found[-1])[0]) + 1
            self._oldest = slots[last:], stamps[last:]
        else:
            pinned = self.pins[self._rows()].any(axis=0)
            slots = np.flatnonzero((self.state >= READY) & ~pinned)
            if len(slots) < count:
                return None
            # An engine that was stopped amid a use has set it back.
            self.head[USES] = max(int(self.head[USES]), int(self.used.max()))
            # More than this call needs are found at once, as the search looks at all pages.
            most = min(len(slots), max(count, self.num_slots // 32))
            slots = slots[np.argpartition(self.used[slots], most - 1)[:most]]
            slots = slots[np.argsort(self.used[slots], kind="stable")]
            found, slots = slots[:count], slots[count:]
            self._oldest = slots, self.used[slots]
        self.state[found] = FREE
        self.evicted += count
        return found


def _ranges(free: Array, count: int) -> Array:
    """``count`` of the ascending ``free`` slots, from the shortest range with so many, or from the
    longest ranges."""
    begins = np.flatnonzero(np.diff(free, prepend=-2) > 1)
    lengths = np.diff(begins, append=len(free))
    runs = np.argsort(np.where(lengths >= count, lengths - len(free) - 1, -lengths), kind="stable")
    runs = runs[: np.searchsorted(np.cumsum(lengths[runs]), count) + 1]
    taken = [free[begins[run] : begins[run] + lengths[run]] for run in runs]
    return np.sort(np.concatenate(taken)[:count])

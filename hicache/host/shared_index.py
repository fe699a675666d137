"""The index of a pool that several engines share: one engine's view of the shared slots."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vllm_graft.hicache.host.eviction import LruPolicy
from vllm_graft.hicache.host.free_slots import facing
from vllm_graft.hicache.host.index import HostIndex, Page
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.host.shared_slots import (
    FILLING,
    GIVEN,
    GONE,
    READY,
    RECORD_BYTES,
    Array,
)
from vllm_graft.hicache.pages.page_key import MAX_HASH_BYTES, NAMESPACE_BYTES, PageKey

_POOL_AT = NAMESPACE_BYTES + MAX_HASH_BYTES


class SharedIndex(HostIndex):
    """Finds pages of a namespace. Which page is in which slot is learned from the pool's log, and
    is exact while the pool's lock is held; else a page may have left. So it is asked again, with
    the lock, before a page is read."""

    def __init__(self, pool: HostPool, space: bytes, page_bytes: Mapping[int, int]) -> None:
        slots = pool.shape.num_slots
        super().__init__(slots, LruPolicy(slots), page_bytes)
        assert pool.shared is not None
        self._pool, self._space, self._slots = pool, space, pool.shared
        self._slots.claim_scheduler()
        self._seen = -self.num_slots - 1
        """Number of pages that slots had been given to at the last look."""
        self._slot_of: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}
        self._ours: dict[int, Page] = {}
        """The pages that this engine holds, by their slots."""
        self._offered: set[int] = set()
        """Slots that are pinned for loads that requests of this step may begin."""
        self._read: set[PageKey] = set()
        """The pages that this engine has read from storage and not loaded since."""
        self._counted = (0, 0, 0, 0)
        self.look()

    def __len__(self) -> int:
        # FILLING and READY; the least number wraps around.
        return int(np.count_nonzero(self._slots.state - np.uint8(FILLING) < GONE - FILLING))

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self)

    def get(self, key: PageKey) -> Page | None:
        slot = self._slot_of.get(key)
        if slot is None or (state := self._slots.state.item(slot)) not in (FILLING, READY):
            return None
        page = self._ours.get(slot)
        if page is not None and page.key == key:
            return page if page.indexed else None
        of_other = self._slots.owner.item(slot) != self._slots.row + 1
        return Page(
            key, slot, ready=state == READY, from_storage=key in self._read, of_other=of_other
        )

    def has(self, key: PageKey) -> bool:
        slot = self._slot_of.get(key)
        return slot is not None and self._slots.state.item(slot) == READY

    def reserve(
        self,
        keys: Sequence[PageKey],
        from_storage: bool = False,
        blocks: Sequence[int] | None = None,
    ) -> list[Page] | None:
        given = dict(zip(keys, [0] * len(keys) if blocks is None else blocks))
        if not (wanted := self._missing(given)):
            return []
        if self._is_behind:
            self.look()
        with self._slots.locked() as had:
            if not had or self._is_behind:
                return None
            if self._learn() and not (wanted := self._missing(wanted)):
                return []
            taken = self._slots.take(len(wanted))
            if taken is None:
                return None
            slots = facing(taken.tolist(), list(wanted.values()))
            named = np.frombuffer(b"".join(map(self._record, wanted)), np.uint8)
            self._slots.fill(np.array(slots), named.reshape(-1, RECORD_BYTES))
            self._learn()
        pages = [
            Page(key, slot, holds=1, from_storage=from_storage) for key, slot in zip(wanted, slots)
        ]
        self._ours.update(zip(slots, pages))
        return pages

    def commit(self, pages: Sequence[Page]) -> None:
        for page in pages:
            page.ready = page.indexed
            if page.ready and page.from_storage:
                self._read.add(page.key)
        self._slots.complete(_slots(page for page in pages if page.ready))
        self.release(pages)

    def hold(self, keys: Sequence[PageKey]) -> list[Page] | None:
        slots = self._where(keys)
        if not all(slot in self._ours or slot in self._offered for slot in slots):
            found = self._pin(keys)
            if found is None:
                return None
            slots = found
        pages = []
        others = (self._slots.owner[slots] != self._slots.row + 1).tolist()
        for key, slot, of_other in zip(keys, slots, others):
            page = self._ours.get(slot)
            if page is None:
                read = key in self._read
                page = Page(key, slot, ready=True, from_storage=read, of_other=of_other)
            elif not (page.ready and page.indexed):
                self._unpin(slots)
                return None
            pages.append(page)
        for page in pages:
            self._ours[page.slot] = page
            self._read.discard(page.key)
            page.holds += 1
        return pages

    def release(self, pages: Iterable[Page]) -> None:
        ended = []
        for page in pages:
            page.holds -= 1
            if page.holds == 0:
                ended.append(self._ours.pop(page.slot))
        self._slots.abandon(_slots(page for page in ended if not page.ready))
        self._unpin(page.slot for page in ended if page.ready)

    def forget(self, pages: Iterable[Page]) -> None:
        known = [page for page in pages if page.indexed]
        for page in known:
            page.indexed = False
        if slots := [page.slot for page in known if page.ready]:
            with self._slots.locked() as had:
                if had:
                    self._slots.drop(np.array(slots))
                    return
            # They stay, for others. This engine must not offer what it would not hold.
            for page in known:
                if self._slot_of.get(page.key) == page.slot:
                    del self._slot_of[page.key]

    def touch(self, keys: Iterable[PageKey]) -> None:
        found = [slot for key in keys if (slot := self._slot_of.get(key)) is not None]
        self._slots.use(np.array(found, np.int64))

    refresh = touch

    def clear(self) -> None:
        for page in self._ours.values():
            # What is ready is right for others, and this engine's keys are other ones from now on.
            page.indexed &= page.ready

    def empty(self) -> bool:
        with self._slots.locked() as had:
            if had:
                self._slots.drop(np.flatnonzero(self._slots.state == READY))
            return had

    def look(self) -> None:
        slots, found = self._slots, None
        if slots.head[GIVEN] != self._seen or slots.care_is_due:
            with slots.locked() as had:
                if had and self._is_behind:
                    self._seen = int(slots.head[GIVEN])
                    there = np.flatnonzero((slots.state == FILLING) | (slots.state == READY))
                    found = there, slots.records[there].tobytes()
                elif had:
                    self._learn()
        if found is not None:
            # Of many slots it takes longer than others wait for the lock.
            self._slot_of.clear()
            self._key_of.clear()
            self._take(found[0].tolist(), found[1])
            self._read.intersection_update(self._slot_of)

    def offer(self, keys: Sequence[PageKey]) -> bool:
        slots = self._pin(keys)
        self._offered.update(slots or ())
        return slots is not None

    def end_offers(self) -> None:
        offered, self._offered = self._offered, set()
        self._unpin(offered)

    def counts(self) -> dict[str, int]:
        slots, before = self._slots, self._counted
        self._counted = (slots.evicted, slots.waits, slots.given_up, slots.reaped)
        names = ("evictions", "lock_waits", "lock_timeouts", "reaped_engines")
        found = {name: now - was for name, now, was in zip(names, self._counted, before)}
        return {**found, "sharing_engines": slots.alive}

    def close(self) -> None:
        self._pool.close()

    def _missing(self, keys: Mapping[PageKey, int]) -> dict[PageKey, int]:
        return {key: block for key, block in keys.items() if self.get(key) is None}

    def _where(self, keys: Iterable[PageKey]) -> list[int]:
        """The slots of pages, -1 where none is known."""
        get = self._slot_of.get
        return [get(key, -1) for key in keys]

    def _pin(self, keys: Sequence[PageKey]) -> list[int] | None:
        """Pin ready pages, and return their slots; None, with nothing pinned, if one is not."""
        if self._is_behind:
            self.look()
        with self._slots.locked() as had:
            if not had or self._is_behind:
                return None
            self._learn()
            slots = self._where(keys)
            return slots if -1 not in slots and self._slots.pin(np.array(slots, np.int64)) else None

    def _unpin(self, slots: Iterable[int]) -> None:
        """Unpin what neither a job nor an offer needs any more."""
        free = [slot for slot in slots if slot not in self._ours and slot not in self._offered]
        self._slots.unpin(np.array(free, np.int64))

    def _learn(self) -> bool:
        """Take in which slots were given to which pages, and whether any was; the lock is held."""
        slots = self._slots
        given = int(slots.head[GIVEN])
        if given == self._seen:
            return False
        some = slots.log[np.arange(self._seen, given) % self.num_slots]
        self._seen = given
        for slot in some.tolist():
            before = self._key_of.pop(slot, None)
            if before is not None and self._slot_of.get(before) == slot:
                del self._slot_of[before]
                self._read.discard(before)
        some = some[(slots.state[some] == FILLING) | (slots.state[some] == READY)]
        self._take(some.tolist(), slots.records[some].tobytes())
        return True

    @property
    def _is_behind(self) -> bool:
        """Whether the log has not all of what was given to slots since the last look."""
        return int(self._slots.head[GIVEN]) - self._seen > self.num_slots

    def _take(self, slots: Sequence[int], records: bytes) -> None:
        """Note which pages of this namespace are in slots, as their records name them."""
        for place, slot in enumerate(slots):
            record = records[place * RECORD_BYTES : (place + 1) * RECORD_BYTES]
            if record.startswith(self._space):
                key = _key(record)
                self._slot_of[key], self._key_of[slot] = slot, key

    def _record(self, key: PageKey) -> bytes:
        head = self._space + key.hash.ljust(MAX_HASH_BYTES, b"\0") + key.pool.to_bytes(2, "little")
        return head + bytes((len(key.hash), 0))


def _key(record: bytes) -> PageKey:
    pool = int.from_bytes(record[_POOL_AT : _POOL_AT + 2], "little")
    return PageKey(record[NAMESPACE_BYTES : NAMESPACE_BYTES + record[_POOL_AT + 2]], pool)


def _slots(pages: Iterable[Page]) -> Array:
    return np.array([page.slot for page in pages], np.int64)

"""The index of a pool that several engines share: one engine's view of the shared slots."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vllm_graft.hicache.host.free_slots import facing
from vllm_graft.hicache.host.index import Page, PageIndex
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.host.shared_slots import (
    FILLING,
    GIVEN,
    READY,
    RECORD_BYTES,
    Array,
    SharedSlots,
)
from vllm_graft.hicache.pages.page_key import MAX_HASH_BYTES, NAMESPACE_BYTES, PageKey

_POOL_AT = NAMESPACE_BYTES + MAX_HASH_BYTES


class SharedIndex(PageIndex):
    """Finds pages of a namespace. Which page is in which slot is learned from the pool's log, and
    is exact while the pool's lock is held; else a page may have left. So it is asked again, with
    the lock, before a page is read."""

    def __init__(self, pool: HostPool, space: bytes, page_bytes: Mapping[int, int]) -> None:
        super().__init__(pool.shape.num_slots, page_bytes)
        self._pool, self._space = pool, space
        self._slots: SharedSlots = pool.shared
        self._slots.claim_scheduler()
        self._seen = -self.num_slots - 1
        """Number of pages that slots had been given to at the last look."""
        self._slot_of: dict[PageKey, int] = {}
        self._key_of: dict[int, PageKey] = {}
        self._pages: dict[int, Page] = {}
        """The pages that this engine holds, by their slots."""
        self._offered: list[Page] = []
        self._counted = (0, 0, 0, 0)
        self.look()

    def __len__(self) -> int:
        state = self._slots.state
        return int(np.count_nonzero((state == FILLING) | (state == READY)))

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self)

    def get(self, key: PageKey) -> Page | None:
        slot = self._slot_of.get(key)
        if slot is None or (state := self._slots.state.item(slot)) not in (FILLING, READY):
            return None
        page = self._pages.get(slot)
        if page is not None and page.key == key:
            return page if page.indexed else None
        return Page(key, slot, ready=state == READY)

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
        with self._slots.locked() as had:
            if not had:
                return None
            self._learn()
            if not (wanted := self._missing(wanted)):
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
        self._pages.update(zip(slots, pages))
        return pages

    def commit(self, pages: Sequence[Page]) -> None:
        for page in pages:
            page.ready = page.indexed
        self._slots.complete(_slots(page for page in pages if page.ready))
        self.release(pages)

    def hold(self, keys: Sequence[PageKey]) -> list[Page] | None:
        others = [key for key in keys if self._held(key) is None]
        if others:
            with self._slots.locked() as had:
                if not had:
                    return None
                self._learn()
                if not all(key in self._slot_of for key in others):
                    return None
                slots = np.array([self._slot_of[key] for key in others])
                if not self._slots.pin(slots):
                    return None
                foreign = self._slots.owner[slots] != self._slots.row + 1
            for key, slot, of_other in zip(others, slots.tolist(), foreign.tolist()):
                self._pages[slot] = Page(key, slot, ready=True, of_other=of_other)
        pages = [page for key in keys if (page := self._held(key)) is not None]
        for page in pages:
            page.holds += 1
        return pages

    def release(self, pages: Iterable[Page]) -> None:
        ended = []
        for page in pages:
            page.holds -= 1
            if page.holds == 0:
                ended.append(self._pages.pop(page.slot))
        self._slots.unpin(_slots(page for page in ended if page.ready))
        self._slots.abandon(_slots(page for page in ended if not page.ready))

    def forget(self, pages: Iterable[Page]) -> None:
        known = [page for page in pages if page.indexed]
        for page in known:
            page.indexed = False
        if slots := [page.slot for page in known if page.ready]:
            with self._slots.locked() as had:
                # Else they stay, and nobody can read them before the lock is had again.
                if had:
                    self._slots.drop(np.array(slots))

    def touch(self, keys: Iterable[PageKey]) -> None:
        found = [slot for key in keys if (slot := self._slot_of.get(key)) is not None]
        self._slots.use(np.array(found, np.int64))

    refresh = touch

    def clear(self) -> None:
        for page in self._pages.values():
            # What is ready is right for others, and this engine's keys are other ones from now on.
            page.indexed &= page.ready

    def empty(self) -> bool:
        with self._slots.locked() as had:
            if had:
                self._slots.drop(np.flatnonzero(self._slots.state == READY))
            return had

    def look(self) -> None:
        if self._slots.head[GIVEN] != self._seen or self._slots.care_is_due:
            with self._slots.locked() as had:
                if had:
                    self._learn()

    def offer(self, keys: Sequence[PageKey]) -> bool:
        pages = self.hold(keys)
        self._offered += pages or ()
        return pages is not None

    def end_offers(self) -> None:
        self.release(self._offered)
        self._offered = []

    def counts(self) -> dict[str, int]:
        slots, before = self._slots, self._counted
        self._counted = (slots.evicted, slots.waits, slots.given_up, slots.reaped)
        names = ("evictions", "lock_waits", "lock_timeouts", "reaped_engines")
        found = {name: now - was for name, now, was in zip(names, self._counted, before)}
        return {**found, "sharing_engines": slots.engines_alive}

    def close(self) -> None:
        self._pool.close()

    def _missing(self, keys: Mapping[PageKey, int]) -> dict[PageKey, int]:
        return {key: block for key, block in keys.items() if self.get(key) is None}

    def _held(self, key: PageKey) -> Page | None:
        """The page of a key, if this engine holds it and it is ready."""
        page = self._pages.get(self._slot_of.get(key, -1))
        return page if page is not None and page.ready and page.key == key else None

    def _learn(self) -> None:
        """Take in which slots were given to which pages; the lock is held."""
        slots = self._slots
        given = int(slots.head[GIVEN])
        if given == self._seen:
            return
        if given - self._seen > self.num_slots:
            self._slot_of.clear()
            self._key_of.clear()
            some = np.arange(self.num_slots)
        else:
            some = slots.log[np.arange(self._seen, given) % self.num_slots]
        self._seen = given
        there = (slots.state[some] == FILLING) | (slots.state[some] == READY)
        records = slots.records[some].tobytes()
        for place, (slot, known) in enumerate(zip(some.tolist(), there.tolist())):
            before = self._key_of.pop(slot, None)
            if before is not None and self._slot_of.get(before) == slot:
                del self._slot_of[before]
            record = records[place * RECORD_BYTES : (place + 1) * RECORD_BYTES]
            if known and record.startswith(self._space):
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

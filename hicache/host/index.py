"""Which page is in which slot of the host pool; the scheduler's side, one thread.

A page is *ready* once its bytes are in host memory and are known to be right: only then is it
offered. A page that is being copied, or that a copy or a write reads, is *held* and is not evicted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_graft.hicache.host.eviction import EvictionPolicy
from vllm_graft.hicache.host.free_slots import FreeSlots, facing
from vllm_graft.hicache.pages.page_key import PageKey


@dataclass(eq=False)
class Page:
    """A slot in use.

    Attributes:
        key: what the slot holds.
        slot: number of the slot.
        ready: whether the bytes are there.
        holds: copies and writes in flight that need the slot.
        indexed: False once the key was forgotten; the slot is free when nothing holds it.
        from_storage: whether the bytes came from below host memory.
        volatile: whether the bytes may not outlive the engine.
    """

    key: PageKey
    slot: int
    ready: bool = False
    holds: int = 0
    indexed: bool = True
    from_storage: bool = False
    volatile: bool = False


class HostIndex:
    """Slots of the host pool by page key.

    Args:
        num_slots: slots of the pool, at least 1.
        policy: orders ready pages for eviction.
        page_bytes: by pool, bytes of a page.
    """

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicy,
        page_bytes: Mapping[int, int],
    ) -> None:
        self.num_slots = num_slots
        self.policy = policy
        self.page_cost = dict.fromkeys(page_bytes, 0.0)
        """By pool, seconds that recomputing a page takes."""
        self.evictions = 0
        self._page_bytes = dict(page_bytes)
        self._pages: dict[PageKey, Page] = {}
        self._free = FreeSlots(num_slots)

    def __len__(self) -> int:
        """Pages in the index, ready or not."""
        return len(self._pages)

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def get(self, key: PageKey) -> Page | None:
        """The page of ``key``, ready or not."""
        return self._pages.get(key)

    def has(self, key: PageKey) -> bool:
        """Whether the page can be loaded now."""
        page = self._pages.get(key)
        return page is not None and page.ready

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Tell the policy that pages were used, the least worth first."""
        for key in keys:
            self.policy.touch(key)

    def reserve(
        self,
        keys: Sequence[PageKey],
        from_storage: bool = False,
        blocks: Sequence[int] | None = None,
    ) -> list[Page] | None:
        """Slots for new pages, all or none; each is held once and not ready.

        Args:
            keys: distinct, none of them in the index.
            from_storage: where the bytes will come from.
            blocks: device blocks that the bytes will come from, one for each key.

        Returns:
            A page for each key; None, with nothing changed, if too few slots can be had.
        """
        short = len(keys) - len(self._free)
        if short > 0:
            victims = self.policy.evict(short, self._is_protected)
            if victims is None:
                return None
            for key in victims:
                if isinstance(key, PageKey):
                    self._drop(self._pages[key])
            self.evictions += len(victims)
        slots = self._free.take(len(keys))
        if blocks is not None:
            slots = facing(slots, blocks)
        pages = [
            Page(key, slot, holds=1, from_storage=from_storage) for key, slot in zip(keys, slots)
        ]
        self._pages.update(zip(keys, pages))
        return pages

    def refresh(self, keys: Iterable[PageKey]) -> None:
        """Tell the policy that pages are recent, though not used anew, the least worth first."""
        for key in keys:
            self.policy.refresh(key)

    def commit(self, pages: Sequence[Page]) -> None:
        """The bytes of reserved pages have arrived: offer them, and release them.

        Args:
            pages: of each pool, the head of the prefix first: its tail shall leave before it.
        """
        for page in reversed(pages):
            page.ready = True
            if page.indexed:
                pool = page.key.pool
                self.policy.insert(page.key, self.page_cost[pool], self._page_bytes[pool])
        self.release(pages)

    def hold(self, pages: Iterable[Page]) -> None:
        """Keep the slots of pages until they are released as often."""
        for page in pages:
            page.holds += 1

    def release(self, pages: Iterable[Page]) -> None:
        """Undo a hold."""
        for page in pages:
            page.holds -= 1
            if not page.indexed and page.holds == 0:
                self._free.give(page.slot)

    def forget(self, pages: Iterable[Page]) -> None:
        """Take pages out of the index; their slots are free when nothing holds them."""
        for page in pages:
            if page.indexed:
                self.policy.remove(page.key)
                self._drop(page)

    def clear(self) -> None:
        """Forget every page."""
        self.forget(list(self._pages.values()))
        self.policy.clear()

    def _drop(self, page: Page) -> None:
        del self._pages[page.key]
        page.indexed = False
        if page.holds == 0:
            self._free.give(page.slot)

    def _is_protected(self, key: Hashable) -> bool:
        page = self._pages.get(key) if isinstance(key, PageKey) else None
        return page is None or page.holds > 0

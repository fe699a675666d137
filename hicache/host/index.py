"""The index of the host pool: it knows which page is in which slot. Only the scheduler's thread
uses it. A page is *ready* once its bytes are in host memory and were checked; only then is it
offered to requests. A page that a copy or a write needs is *held*, and is not evicted meanwhile."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_graft.hicache.host.eviction import EvictionPolicy
from vllm_graft.hicache.host.free_slots import FreeSlots, facing
from vllm_graft.hicache.pages.page_key import PageKey


@dataclass(eq=False)
class Page:
    """A slot in use, and the page in it.

    Attributes:
        ready: whether the page's bytes have arrived.
        holds: number of copies and writes in flight that need the slot.
        indexed: False once the key was forgotten. The slot is then freed when nothing holds it.
        from_storage: whether the bytes come from storage.
        volatile: whether the bytes must not outlive the engine.
        of_other: whether another engine has written the bytes, or writes them.
    """

    key: PageKey
    slot: int
    ready: bool = False
    holds: int = 0
    indexed: bool = True
    from_storage: bool = False
    volatile: bool = False
    of_other: bool = False


class HostIndex:
    """Maps page keys to slots of a pool that one engine uses; ``SharedIndex`` is for several. The
    policy orders ready pages. ``page_bytes`` has the bytes of a page of each pool, by the pool's
    number."""

    def __init__(
        self, num_slots: int, policy: EvictionPolicy, page_bytes: Mapping[int, int]
    ) -> None:
        self.num_slots = num_slots
        self.policy = policy
        self.page_cost = dict.fromkeys(page_bytes, 0.0)
        """Seconds that recomputing a page of each pool takes, by the pool's number."""
        self.evictions = 0
        self._page_bytes = dict(page_bytes)
        self._pages: dict[PageKey, Page] = {}
        self._free = FreeSlots(num_slots)

    def __len__(self) -> int:
        """Number of pages in the index, ready or not."""
        return len(self._pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def get(self, key: PageKey) -> Page | None:
        """The page of ``key``, ready or not."""
        return self._pages.get(key)

    def has(self, key: PageKey) -> bool:
        """Whether the page can be loaded now."""
        page = self._pages.get(key)
        return page is not None and page.ready

    def touch(self, keys: Iterable[PageKey]) -> None:
        """Tell the policy that pages were used. The least valuable page comes first."""
        for key in keys:
            self.policy.touch(key)

    def reserve(
        self,
        keys: Sequence[PageKey],
        from_storage: bool = False,
        blocks: Sequence[int] | None = None,
    ) -> list[Page] | None:
        """Reserve slots for new pages, and evict other pages if necessary. The new pages are not
        ready, and each is held once. Pages that the pool has already, or that are on their way to
        it, are left out. ``blocks`` are the device blocks that their bytes will come from. The
        result is None, with nothing changed, if there cannot be a slot for each."""
        blocks = [0] * len(keys) if blocks is None else blocks
        wanted = {key: block for key, block in zip(keys, blocks) if key not in self._pages}
        short = len(wanted) - len(self._free)
        if short > 0:
            victims = self.policy.evict(short, self._is_protected)
            if victims is None:
                return None
            for key in victims:
                if isinstance(key, PageKey):
                    self._drop(self._pages[key])
            self.evictions += len(victims)
        slots = facing(self._free.take(len(wanted)), list(wanted.values()))
        pages = [
            Page(key, slot, holds=1, from_storage=from_storage) for key, slot in zip(wanted, slots)
        ]
        self._pages.update(zip(wanted, pages))
        return pages

    def refresh(self, keys: Iterable[PageKey]) -> None:
        """Tell the policy that pages are recent, without a use. The least valuable comes first."""
        for key in keys:
            self.policy.refresh(key)

    def commit(self, pages: Sequence[Page]) -> None:
        """Make reserved pages ready, because their bytes have arrived, and release them. In each
        pool the head of the prefix comes first, as the tail shall be evicted before it."""
        for page in reversed(pages):
            page.ready = True
            if page.indexed:
                pool = page.key.pool
                self.policy.insert(page.key, self.page_cost[pool], self._page_bytes[pool])
        self.release(pages)

    def hold(self, keys: Sequence[PageKey]) -> list[Page] | None:
        """Keep the slots of ready pages until :meth:`release` was called as often as this. The
        result is None, with nothing held, if one of them is not ready."""
        pages = [page for key in keys if (page := self._pages.get(key)) is not None and page.ready]
        if len(pages) < len(keys):
            return None
        for page in pages:
            page.holds += 1
        return pages

    def release(self, pages: Iterable[Page]) -> None:
        """Undo one :meth:`hold` of each page."""
        for page in pages:
            page.holds -= 1
            if not page.indexed and page.holds == 0:
                self._free.give(page.slot)

    def forget(self, pages: Iterable[Page]) -> None:
        """Remove held pages from the index. Their slots are freed when nothing holds them."""
        for page in pages:
            if page.indexed:
                self.policy.remove(page.key)
                self._drop(page)

    def clear(self) -> None:
        """Forget all pages that this engine finds by its keys of until now, or has in flight."""
        self.forget(list(self._pages.values()))
        self.policy.clear()

    def empty(self) -> bool:
        """Forget all pages, those of other engines too, after :meth:`clear`; False if that has to
        be tried again."""
        return True

    def look(self) -> None:
        """Learn which pages other engines have brought."""

    def offer(self, keys: Sequence[PageKey]) -> bool:
        """Keep ready pages until :meth:`end_offers`, as a request may be going to load them; False
        if one is not ready any more. Nothing but other engines can come between."""
        return True

    def end_offers(self) -> None:
        """Let go of what was offered. Loads that were issued hold their pages themselves."""

    def counts(self) -> dict[str, int]:
        """Counters since the last call, and gauges."""
        found, self.evictions = {"evictions": self.evictions}, 0
        return found

    def close(self) -> None:
        """Let go of the memory."""

    def _drop(self, page: Page) -> None:
        del self._pages[page.key]
        page.indexed = False
        if page.holds == 0:
            self._free.give(page.slot)

    def _is_protected(self, key: Hashable) -> bool:
        page = self._pages.get(key) if isinstance(key, PageKey) else None
        return page is None or page.holds > 0

"""The order in which a request's pages leave host memory: the tail of its prefix first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_graft.hicache.host.index import HostIndex
from vllm_graft.hicache.pages.groups import Group
from vllm_graft.hicache.pages.page_key import PageKey


class Recency:
    """Refreshes the pages of ended requests, tail first, once their stores have ended too.

    A page without those before it is of no use, but pages come to the host head first, so that the
    head is the oldest. What the request had found on the device is refreshed as well: it is in use,
    though nobody loads it.

    Args:
        groups: pools that are cached.
        index: what host memory has.
    """

    def __init__(self, groups: Sequence[Group], index: HostIndex) -> None:
        self._groups = groups
        self._index = index
        self._waiting: list[tuple[list[PageKey], list[PageKey]]] = []

    def ended(self, keys: Mapping[int, Sequence[PageKey]], tokens: int) -> None:
        """A request has ended.

        Args:
            keys: by group number, keys of its full blocks.
            tokens: that it has computed.
        """
        pages = [
            (number * group.block_tokens, key)
            for group in self._groups
            for number, key in enumerate(keys[group.index][: max(0, tokens) // group.block_tokens])
            if self._index.get(key) is not None
        ]
        pages.sort(key=lambda page: page[0], reverse=True)
        ordered = [key for _, key in pages]
        self._waiting.append((ordered, [key for key in ordered if not self._index.has(key)]))
        self.poll()

    def poll(self) -> None:
        """Refresh those of which no page is on its way any more."""
        waiting = []
        for ordered, coming in self._waiting:
            while coming and not self._is_coming(coming[-1]):
                coming.pop()
            if coming:
                waiting.append((ordered, coming))
            else:
                self._index.refresh(ordered)
        self._waiting = waiting

    def _is_coming(self, key: PageKey) -> bool:
        page = self._index.get(key)
        return page is not None and not page.ready

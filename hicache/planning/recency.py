"""Keeps a request's pages in order for eviction: the tail of its prefix leaves first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_graft.hicache.host.index import HostIndex
from vllm_graft.hicache.pages.groups import Group
from vllm_graft.hicache.pages.page_key import PageKey


class Recency:
    """Refreshes the pages of ended requests, tail first, once their stores have ended too.

    A page is useless without the pages before it. But pages are stored head first, so that without
    this the head would be the oldest and leave first. Pages that the request found on the device
    are refreshed too, because they are in use although no request loads them from the host.

    Args:
        groups: pools that are cached.
        index: index of the host pool.
    """

    def __init__(self, groups: Sequence[Group], index: HostIndex) -> None:
        self._groups = groups
        self._index = index
        self._waiting: list[tuple[list[PageKey], list[PageKey]]] = []

    def ended(self, keys: Mapping[int, Sequence[PageKey]], tokens: int) -> None:
        """Note that a request has ended.

        Args:
            keys: keys of its full blocks, by the group's number.
            tokens: number of tokens that it has computed.
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
        """Refresh the pages of ended requests whose stores have all ended."""
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

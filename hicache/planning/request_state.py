"""The state of a request on the scheduler's side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import overload

from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

from vllm_graft.hicache.host.index import HostIndex, Page
from vllm_graft.hicache.pages.groups import Group, HitPolicy
from vllm_graft.hicache.pages.page_key import PageKey, salted


@dataclass
class Chosen:
    """The load that the last lookup offered: of the tokens ``start`` to ``end``. ``layerwise`` says
    whether the request's first step loads them, layer by layer."""

    start: int
    end: int
    layerwise: bool


class Keys(Sequence[PageKey]):
    """The keys of a request's full blocks in one group, made when they are first asked for. So a
    long prompt takes no longer than the pages that are looked at, and no key is made twice,
    although vLLM looks a waiting request up in every step."""

    def __init__(self, request: Request, group: Group, salt: bytes) -> None:
        self._request, self._salt = request, salt
        self._pool, self._step = group.index, group.hashes_per_block
        self._made: list[PageKey] = []
        self._last: bytes | None = None
        """Hash of the last block whose key was made."""

    def __len__(self) -> int:
        return len(self._request.block_hashes) // self._step

    @overload
    def __getitem__(self, block: int) -> PageKey: ...

    @overload
    def __getitem__(self, block: slice) -> list[PageKey]: ...

    def __getitem__(self, block: int | slice) -> PageKey | list[PageKey]:
        if isinstance(block, slice):
            places = range(len(self))[block]
            return self.leading(max(places.start, places.stop))[block] if places else []
        place = range(len(self))[block]
        return self.leading(place + 1)[place]

    def leading(self, count: int) -> list[PageKey]:
        """The keys of at least the first ``count`` blocks, as far as they are full. The list is the
        one that is kept. It is not to be changed."""
        hashes, step, made = self._request.block_hashes, self._step, self._made
        # A session that goes on replaces its last blocks. Each hash covers all blocks before.
        if made and hashes[len(made) * step - 1 : len(made) * step] != [self._last]:
            made.clear()
        count = min(count, len(self))
        if count > len(made):
            fresh = hashes[(len(made) + 1) * step - 1 : count * step : step]
            made += [PageKey(salted(bytes(each), self._salt), self._pool) for each in fresh]
            self._last = fresh[-1]
        return made


@dataclass
class RequestState:
    """The state of one request.

    Attributes:
        keys: keys of the request's full blocks, by the group's number.
        stored: number of leading blocks that were considered for a store, by the group's number.
        computed: number of tokens that the device had at the last lookup.
        sources: number of tokens of the accepted offer from each source.
        suspect: whether a load has failed, so that blocks may be invalid.
        outdated: whether K/V of the request may come from before a reset or from weights that were
            replaced. It is not stored until the request computes anew.
    """

    request: Request
    groups: Sequence[Group]
    salt: bytes = b""
    keys: dict[int, Keys] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    chosen: Chosen | None = None
    computed: int = 0
    sources: dict[CacheHitSource, int] = field(default_factory=dict)
    suspect: bool = False
    outdated: bool = False

    def __post_init__(self) -> None:
        self.begin(self.salt)

    def begin(self, salt: bytes) -> None:
        """Make the keys, of a request that computes all of its K/V now."""
        self.salt, self.outdated = salt, False
        for group in self.groups:
            self.keys[group.index] = Keys(self.request, group, salt)
            self.stored[group.index] = 0

    @property
    def volatile(self) -> bool:
        """Whether the request's KV must not outlive the engine. With LoRA it must not, because
        vLLM's block hash covers an adapter's name, not its weights."""
        return self.request.lora_request is not None

    def due(self, tokens: int) -> bool:
        """Whether there is a full block below ``tokens`` that was not considered for a store."""
        return any(
            min(tokens // group.block_tokens, len(self.keys[group.index]))
            > self.stored[group.index]
            for group in self.groups
            if group.hit_policy is not HitPolicy.LAST_PAGE
        )

    def needed(self, start: int, end: int) -> list[PageKey]:
        """The keys of all pages that extend a prefix from ``start`` to ``end`` tokens."""
        keys = []
        for group in self.groups:
            numbers = group.needed(start, end)
            keys += self.keys[group.index][numbers.start : numbers.stop]
        return keys

    def key_at(self, group: Group, tokens: int) -> PageKey | None:
        """The key of a group's page that ends at ``tokens``; None if there is no such page."""
        block = tokens // group.block_tokens - 1
        keys = self.keys[group.index]
        if tokens % group.block_tokens or not 0 <= block < len(keys):
            return None
        return keys[block]


class Recency:
    """Refreshes the pages of ended requests, tail first, once their stores have ended too. A page
    is useless without the pages before it. But pages are stored head first, so that without this
    the head would be the oldest and leave first. Pages that the request found on the device are
    refreshed too, because they are in use although no request loads them from the host."""

    def __init__(self, groups: Sequence[Group], index: HostIndex) -> None:
        self._groups, self._index = groups, index
        self._waiting: list[tuple[list[PageKey], list[PageKey]]] = []

    def ended(self, keys: Mapping[int, Sequence[PageKey]], tokens: int) -> None:
        """Note that a request has ended that has computed ``tokens`` tokens. ``keys`` are those of
        its full blocks, by the group's number."""
        pages = [
            (number * group.block_tokens, key, not _is_coming(page))
            for group in self._groups
            for number, key in enumerate(keys[group.index][: max(0, tokens) // group.block_tokens])
            if (page := self._index.get(key)) is not None
        ]
        pages.sort(key=itemgetter(0), reverse=True)
        coming = [key for _, key, ready in pages if not ready]
        self._waiting.append(([key for _, key, _ in pages], coming))
        self.poll()

    def poll(self) -> None:
        """Refresh the pages of ended requests whose stores have all ended."""
        waiting = []
        for ordered, coming in self._waiting:
            while coming and not _is_coming(self._index.get(coming[-1])):
                coming.pop()
            if coming:
                waiting.append((ordered, coming))
            else:
                self._index.refresh(ordered)
        self._waiting = waiting


def _is_coming(page: Page | None) -> bool:
    """Whether this engine is storing a page. Another one's may be stopped, and never end."""
    return page is not None and not page.ready and not page.of_other

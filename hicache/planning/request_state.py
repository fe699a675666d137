"""What the scheduler's side remembers of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_graft.hicache.pages.groups import Group, HitPolicy
from vllm_graft.hicache.pages.page_key import PageKey

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class Chosen:
    """What the last lookup offered.

    Attributes:
        start: tokens that were on the device already.
        end: tokens of the prefix with the load.
        layerwise: whether the load is part of the request's first step.
    """

    start: int
    end: int
    layerwise: bool


@dataclass
class RequestState:
    """One request.

    Attributes:
        request: vLLM's.
        groups: pools that are cached.
        keys: by group number, keys of the request's full blocks.
        stored: by group number, blocks that have been looked at for storing.
        chosen: what the last lookup offered.
        sources: tokens of the accepted offer, by where they come from.
        suspect: whether a load has failed: the blocks may not hold what vLLM counts as computed.
    """

    request: Request
    groups: Sequence[Group]
    keys: dict[int, list[PageKey]] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    chosen: Chosen | None = None
    sources: dict[CacheHitSource, int] = field(default_factory=dict)
    suspect: bool = False

    def __post_init__(self) -> None:
        for group in self.groups:
            self.keys[group.index] = []
            self.stored[group.index] = 0
        self.update_keys()

    @property
    def volatile(self) -> bool:
        """Whether the request's KV may not outlive the engine.

        vLLM's block hash names a LoRA adapter, and does not tell its weights.
        """
        return self.request.lora_request is not None

    def update_keys(self) -> None:
        """Take in hashes that vLLM has computed since."""
        hashes = self.request.block_hashes
        for group in self.groups:
            keys, step = self.keys[group.index], group.hashes_per_block
            for last in range((len(keys) + 1) * step - 1, len(hashes), step):
                keys.append(PageKey(bytes(hashes[last]), group.index))

    def due(self, tokens: int) -> bool:
        """Whether a full block below ``tokens`` has not been looked at for storing."""
        return any(
            min(tokens // group.block_tokens, len(self.keys[group.index]))
            > self.stored[group.index]
            for group in self.groups
            if group.hit_policy is not HitPolicy.LAST_PAGE
        )

    def key_at(self, group: Group, tokens: int) -> PageKey | None:
        """Key of the page that ends at ``tokens``; None if there is no such page."""
        block = tokens // group.block_tokens - 1
        keys = self.keys[group.index]
        if tokens % group.block_tokens or not 0 <= block < len(keys):
            return None
        return keys[block]

"""KV cache groups as the host cache sees them, and the longest prefix that all of them hold. A
group is a set of layers that share a block table. Its kind of attention decides which of its blocks
a prefix of ``t`` tokens needs: every block, the last few (a sliding window), or only the state at
``t`` (a recurrent layer). This module is plain Python: no engine, no tensors."""

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Has = Callable[[int, int], bool]
"""``has(group, block)``: whether the page of a request's block can be loaded."""


class HitPolicy(enum.Enum):
    """The pages of a prefix that a pool has to hold before the prefix is a hit."""

    ALL_PAGES = "all"
    """Every page. Full attention and MLA need this."""
    TRAILING_PAGES = "trailing"
    """The pages that overlap the window before the prefix's end."""
    LAST_PAGE = "last"
    """The page that ends with the prefix. It holds a recurrent state."""


@dataclass(frozen=True)
class Group:
    """One KV cache group, ``index`` in vLLM's list.

    Attributes:
        hashes_per_block: hashes that vLLM computes per block, at least 1.
        window: tokens that attention looks back, the current one included, with TRAILING_PAGES.
        page_bytes: bytes of one rank's page on the host.
        layers: names of the layers, in the order in which they run.
    """

    index: int
    block_tokens: int
    hashes_per_block: int
    hit_policy: HitPolicy
    window: int
    page_bytes: int
    layers: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the pool in logs and transfers."""
        return f"{self.index}:{self.hit_policy.value}"

    def needed(self, start: int, end: int) -> range:
        """Numbers of the blocks to load in order to extend a prefix from ``start`` to ``end``. Both
        are tokens, multiples of ``block_tokens``; the device has the KV of ``start`` already."""
        first, last = start // self.block_tokens, end // self.block_tokens
        if self.hit_policy is HitPolicy.LAST_PAGE:
            first = max(first, last - 1)
        elif self.hit_policy is HitPolicy.TRAILING_PAGES:
            # Token `end` looks back at end - window + 1.
            oldest = max(0, end - self.window + 1)
            first = max(first, oldest // self.block_tokens)
        return range(first, last)


def alignment(groups: Sequence[Group]) -> int:
    """The tokens at which the blocks of all groups end; the length of every hit is a multiple."""
    return math.lcm(*(group.block_tokens for group in groups))


def longest_hit(groups: Sequence[Group], start: int, limit: int, has: Has) -> int:
    """The tokens of the longest prefix whose needed pages every group has, or ``start``. `start`:
    tokens whose KV is on the device already, a multiple of :func:`alignment`. `limit`: most tokens
    that the prefix may have. `has`: says whether a block of ``Group.needed`` can be loaded."""
    step = alignment(groups)
    end = limit // step * step
    # Groups that need all pages are searched once, from the front.
    for group in groups:
        if group.hit_policy is HitPolicy.ALL_PAGES:
            blocks = group.needed(start, end)
            missing = next((block for block in blocks if not has(group.index, block)), None)
            if missing is not None:
                end = missing * group.block_tokens // step * step
    others = [group for group in groups if group.hit_policy is not HitPolicy.ALL_PAGES]
    while end > start:
        shorter = min((_fits(group, start, end, has) for group in others), default=end)
        if shorter >= end:
            return end
        end = shorter // step * step
    return start


def _fits(group: Group, start: int, end: int, has: Has) -> int:
    """``end`` if it is a hit in this group. Otherwise the longest prefix that may still be one."""
    for block in reversed(group.needed(start, end)):
        if not has(group.index, block):
            # Every window that contains the missing block fails too, so the prefix ends before it.
            return min(end - 1, block * group.block_tokens)
    return end

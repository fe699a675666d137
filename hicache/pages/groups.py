"""KV cache groups as the host cache sees them, and the longest prefix that all of them hold.

A group is a set of layers with one block table. What a prefix of ``t`` tokens needs of it depends
on its attention: full attention every block, a sliding window the last few, a recurrent state only
the state at ``t``. Pure Python: no engine, no tensors.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Has = Callable[[int, int], bool]
"""``has(group, block)``: whether the page of a request's block is there to be loaded."""


class HitPolicy(enum.Enum):
    """Which pages of a prefix a pool has to hold before the prefix is a hit."""

    ALL_PAGES = "all"
    """Every page: full attention, MLA."""

    TRAILING_PAGES = "trailing"
    """Those that reach into the window before the prefix's end."""

    LAST_PAGE = "last"
    """The one that ends with the prefix: a recurrent state."""


@dataclass(frozen=True)
class Group:
    """One KV cache group.

    Attributes:
        index: its number in vLLM's list of groups.
        block_tokens: tokens of a block.
        hashes_per_block: hashes that vLLM computes for so many tokens, at least 1.
        hit_policy: which pages a prefix needs.
        window: tokens that attention looks back, the current one included; 0 is all. Only for
            TRAILING_PAGES.
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
        """Blocks that a prefix of ``end`` tokens needs when those below ``start`` are there.

        Both are multiples of ``block_tokens``.
        """
        first, last = start // self.block_tokens, end // self.block_tokens
        if self.hit_policy is HitPolicy.LAST_PAGE:
            first = max(first, last - 1)
        elif self.hit_policy is HitPolicy.TRAILING_PAGES:
            # Token `end` looks back at end - window + 1.
            oldest = max(0, end - self.window + 1)
            first = max(first, oldest // self.block_tokens)
        return range(first, last)


def alignment(groups: Sequence[Group]) -> int:
    """Tokens of which a hit is a multiple: every group's blocks end there."""
    return math.lcm(*(group.block_tokens for group in groups))


def longest_hit(groups: Sequence[Group], start: int, limit: int, has: Has) -> int:
    """The longest prefix that every group can give, all or nothing.

    Args:
        groups: all groups that take part.
        start: tokens that are on the device already, a multiple of :func:`alignment`.
        limit: most tokens that the prefix may have.
        has: asked about the blocks of ``Group.needed``.

    Returns:
        Tokens of the prefix, a multiple of :func:`alignment`; ``start`` where nothing is gained.
    """
    step = alignment(groups)
    end = limit // step * step
    # Pages that a prefix needs all of are looked at once, from the front.
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
    """``end``, or a shorter prefix above which there can be no hit in this group."""
    for block in reversed(group.needed(start, end)):
        if not has(group.index, block):
            # A window that reaches over the missing block fails too: end before it.
            return min(end - 1, block * group.block_tokens)
    return end

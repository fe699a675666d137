"""Drafts that carry their parents from the worker to the engine core, in one integer each.

A grammar advances in the engine core, where vLLM brings the drafts' tokens, but not the topology of
a tree. A token's id has 32 bits, so the parent travels in the bits above. Lists of such integers
survive all that vLLM does with lists of tokens on the way: they are cut to a prefix and padded
with -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

TOKEN_BITS = 32
_TOKEN = (1 << TOKEN_BITS) - 1


class DraftTree(NamedTuple):
    """A request's tree, on the host. Node 0 is the root; parents come before children.

    Attributes:
        tokens: token of each node; the root's place holds -1, as its token is no draft.
        parents: parent of each node, -1 for the root.
    """

    tokens: list[int]
    parents: list[int]

    @property
    def children(self) -> list[list[int]]:
        """Children of each node."""
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            found[parent].append(node)
        return found

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`; the root's path is empty."""
        found = []
        while node > 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]


def pack(tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Put each draft's parent above its token.

    Args:
        tokens: int64 ``[num_reqs, n]``, drafts; negative ones are padding.
        parents: int32 ``[num_reqs, n]``, node index of each draft's parent; 0 is the root.

    Returns:
        int64 ``[num_reqs, n]``; padding is as it was.
    """
    return tokens.where(tokens < 0, tokens + (parents.long() + 1 << TOKEN_BITS))


def is_packed(drafts: Sequence[int]) -> bool:
    """Whether a list of drafts carries parents; a list of padding does not."""
    return bool(drafts) and drafts[0] > _TOKEN


def tokens_of(packed: Sequence[int]) -> list[int]:
    """The tokens alone; padding stays."""
    return [draft if draft < 0 else draft & _TOKEN for draft in packed]


def unpack(packed: Sequence[int]) -> DraftTree:
    """Read the drafts before the first padding."""
    tree = DraftTree([-1], [-1])
    for draft in packed:
        if draft < 0:
            break
        tree.tokens.append(draft & _TOKEN)
        tree.parents.append((draft >> TOKEN_BITS) - 1)
    return tree

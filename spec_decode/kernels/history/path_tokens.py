"""Tokens on the path to each row: what a row's history has beyond the request's own tokens."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.trees.topology import TreeState


@dataclass(frozen=True)
class PathTokens:
    """The path from the root to each row of a batch that verifies trees.

    Attributes:
        tokens: i32 ``[num_rows, width]``, tokens of the path's nodes, the root's child first; the
            root's own token is part of the request already. Later places are undefined.
        lengths: i32 ``[num_rows]``, nodes of the path: 0 for a root, or a row of no tree.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor

    @property
    def width(self) -> int:
        """Places for the tokens of one row."""
        return int(self.tokens.shape[1])


@Kernel
@triton.jit
def _path_kernel(
    ids, nodes, slots, parents, depths, path_tokens, path_lengths, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    node = tl.load(nodes + row)
    tree = tl.load(slots + row).to(tl.int64) * WIDTH
    first = row - node
    left = tl.load(depths + tree + node)
    tl.store(path_lengths + row, left)
    while left > 0:
        left -= 1
        token = tl.load(ids + first + node)
        tl.store(path_tokens + row * WIDTH + left, token)
        node = tl.load(parents + tree + node)


def path_tokens(
    ids: torch.Tensor, nodes: torch.Tensor, slots: torch.Tensor, tree: TreeState
) -> PathTokens:
    """Collect the tokens on the path to each row.

    Args:
        ids: i32 ``[num_rows]``, token of each row; rows of a request lie together, its root first.
        nodes: i32 ``[num_rows]``, place of each row in its request: the index of its node.
        slots: i64 or i32 ``[num_rows]``, request-state index of each row.
        tree: the trees by request-state index.
    """
    rows = ids.shape[0]
    tokens = torch.empty(rows, tree.width, dtype=torch.int32, device=ids.device)
    lengths = torch.empty(rows, dtype=torch.int32, device=ids.device)
    if rows:
        _path_kernel[(rows,)](
            ids,
            nodes,
            slots,
            tree.parents,
            tree.depths,
            tokens,
            lengths,
            WIDTH=tree.width,
            num_warps=1,
        )
    return PathTokens(tokens, lengths)

"""How a launch of tree attention computes: tile, splits, and what its kernels do besides."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_graft.spec_decode.kernels.attention.tile import Tile


class Plan(NamedTuple):
    """How the kernels of one launch compute. All plans compute the same, but for rounding.

    Attributes:
        tile: What a program holds at a time.
        splits: Programs that share a request's paged keys.
        ahead: Whether page numbers are loaded one step of the loop before their keys.
        edges: Whether the rows' windows are looked at only near where they begin and end. Elsewhere
            all rows see all keys.
        skip_empty: Whether splits without keys, as a graph for long contexts has over short ones,
            neither write nor are read. Otherwise they write that they have seen nothing.
        partials: Dtype of the splits' results: float32, or float16 or bfloat16 for results that
            each split has normalised. Their sums stay float32.
        combine_warps: Warps of a program that combines splits.
        combine_width: Most numbers of a head that such a program makes, a power of 2; 0 for all. It
            holds as many of each split.
        overlapped: Whether the kernel that combines is launched while the splits still run, and
            waits for them itself (programmatic dependent launch). From sm_90 on.
    """

    tile: Tile
    splits: int = 1
    ahead: bool = False
    edges: bool = False
    skip_empty: bool = False
    partials: torch.dtype = torch.float32
    combine_warps: int = 4
    combine_width: int = 0
    overlapped: bool = False

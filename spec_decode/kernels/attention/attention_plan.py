"""How a launch of tree attention computes: tile, splits, and what its kernels do besides."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from vllm_graft.spec_decode.kernels.sizes import next_power_of_2

MAX_TILE = 128
"""Most query rows of a program, times the heads that share K/V, at a head size of 128."""


class Tile(NamedTuple):
    """What a program holds at a time, and how.

    Attributes:
        rows: query rows, times the heads that share K/V.
        keys: keys whose K/V is held.
        stages: stages of its loop over the keys.
    """

    rows: int
    keys: int
    warps: int
    stages: int

    @classmethod
    @functools.cache
    def choose(
        cls, rows: int, head_pad: int, dtype: torch.dtype, *, crowded: bool, split: bool
    ) -> Tile:
        """Choose a tile whose accumulator and two K/V tiles fit a block.

        `rows` are those of a request, times the heads that share K/V. If `crowded`, multiprocessors
        have several programs each, which hide one another's waits; otherwise the loads of one
        program should be few, large and at once. If `split`, several programs share a request's
        keys, so each has few.
        """
        rows = max(16, next_power_of_2(rows))
        if dtype == torch.float32:
            # Exact float32 has no tensor cores: small tiles, or registers spill.
            return cls(min(rows, 32 if head_pad <= 128 else 16), 32, 4, 1)
        wide = max(head_pad, 128) // 128
        if crowded:
            rows = min(rows, MAX_TILE // wide)
            return cls(rows, 64 if wide == 1 else 32, 8 if rows * head_pad > 64 * 128 else 4, 2)
        return cls(min(rows, MAX_TILE // 2 // wide), (64 if split else 128) // wide, 4, 1)


class Plan(NamedTuple):
    """How the kernels of one launch compute. All plans compute the same, but for rounding.

    Attributes:
        tile: what a program holds at a time.
        splits: programs that share a request's paged keys.
        ahead: whether page numbers are loaded one step of the loop before their keys.
        edges: whether the rows' windows are looked at only near where they begin and end.
        skip_empty: whether splits without keys, as a graph for long contexts has over short ones,
            neither write nor are read. Otherwise they write that they have seen nothing.
        partials: dtype of the splits' results: float32, or float16 or bfloat16 for results that
            each split has normalised. Their sums stay float32.
        combine_width: most numbers of a head that a program which combines splits makes, a power of
            2; 0 for all. It holds as many of each split.
        overlapped: whether the kernel that combines is launched while the splits still run, and
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

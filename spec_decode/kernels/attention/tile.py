"""What a program of tree attention holds at a time: a choice by sizes alone."""

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
        rows: Query rows, times the heads that share K/V.
        keys: Keys whose K/V is held.
        warps: Warps of the program.
        stages: Stages of its loop over the keys.
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
        """Rows and keys of a program, so that its accumulator and two K/V tiles fit a block.

        Args:
            rows: Query rows of a request, times the heads that share K/V.
            head_pad: Elements of a head, padded.
            dtype: Dtype of the query.
            crowded: Whether multiprocessors have several programs each, which hide one another's
                waits. Otherwise the wait for the loads of one program counts, which should be few,
                large and at once.
            split: Whether several programs share a request's keys, so that each has few.
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

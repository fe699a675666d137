"""What a program of tree attention holds at a time: a choice by sizes alone."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from vllm_graft.spec_decode.kernels.sizes import next_power_of_2

MAX_TILE = 128
"""Rows of the query at most, times the heads that share K/V, of heads of 128."""


class Tile(NamedTuple):
    """What a program holds at a time, and how.

    Attributes:
        rows: Of the query, times the heads that share K/V.
        keys: Of K/V.
        warps: Of the program.
        stages: Of its loop over the keys.
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
            rows: That there are, times the heads that share K/V.
            head_pad: Elements of a head, padded.
            dtype: Of the query.
            crowded: Whether multiprocessors have several programs each, which hide one another's
                waits. Else what counts is the wait for the loads of one program: few, large and at
                once.
            split: Whether a request's keys are those of several programs: few of each then.
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

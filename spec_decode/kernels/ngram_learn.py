"""Learns how often matches of each length go on as they did before."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.trees.ngram_state import NgramState

MEMORY = 256.0
"""Predicted tokens after which what was seen of a match length counts for 1/e."""

LOWEST, HIGHEST = 0.01, 0.99
"""Bounds of a learned rate: its logarithm has to be negative and finite."""


@Kernel
@triton.jit
def _learn_kernel(
    pending,
    rates,
    PAD: tl.constexpr,
    MEMORY: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    n = tl.arange(0, PAD)
    trials = tl.load(pending + 2 * n).to(tl.float32)
    hits = tl.load(pending + 2 * n + 1).to(tl.float32)
    rate = tl.load(rates + n)
    rate += (hits / tl.maximum(trials, 1.0) - rate) * (1.0 - tl.exp(-trials / MEMORY))
    tl.store(rates + n, tl.minimum(tl.maximum(rate, LOW), HIGH), mask=trials > 0)
    tl.store(pending + 2 * n, tl.zeros([PAD], tl.int32))
    tl.store(pending + 2 * n + 1, tl.zeros([PAD], tl.int32))


def learn_rates(state: NgramState) -> None:
    """Move each rate towards what was seen since the last call: an exponential average.

    It is no part of a growth. So a growth that runs again in the same step, as when a graph is
    compared with launches, finds the same rates and chooses the same tree.

    Args:
        state: ``rates`` is written, ``pending`` becomes 0.
    """
    _learn_kernel[(1,)](
        state.pending,
        state.rates,
        PAD=len(state.rates),
        MEMORY=MEMORY,
        LOW=LOWEST,
        HIGH=HIGHEST,
        num_warps=1,
    )

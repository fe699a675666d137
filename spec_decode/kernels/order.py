"""Integers that order as floats do: a warp finds the largest of 32 integers in one step."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(-(2**31))
"""Below what `ordered` makes of any number: places of what is not there."""

LAST = tl.constexpr(2**31 - 1)
"""Above every index."""


@triton.jit
def ordered(number):
    """One int32 a float32 that orders as it does; equal numbers are equal, NaN is above all."""
    # Minus zero becomes zero, as the two are equal.
    bits = (number + 0.0).to(tl.int32, bitcast=True)
    # A float's bits order like an integer's once those of a negative number are turned round.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(order):
    """The float32 of which `ordered` made this int32."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_of(left, index, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr):
    """The largest of `left`, int32 of `ordered`, by repeated maximum; ties by lower `index`.

    Returns int32 ``[COUNT_PAD]`` each, largest first: the values, and the indices they stand at,
    which must differ wherever a value is above `NONE`. Beyond `COUNT` they say nothing.
    """
    place = tl.arange(0, COUNT_PAD)
    best = tl.full([COUNT_PAD], NONE, tl.int32)
    chosen = tl.zeros([COUNT_PAD], tl.int32)
    for j in range(COUNT):
        top = tl.max(left, 0)
        pick = tl.min(tl.where(left == top, index, LAST), 0)
        best = tl.where(place == j, top, best)
        chosen = tl.where(place == j, pick, chosen)
        left = tl.where(index == pick, NONE, left)
    return best, chosen

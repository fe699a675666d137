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

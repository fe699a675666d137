"""Integers that order as floats do: a warp finds the largest of 32 integers in one step."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(-(2**31))
"""Below every result of `ordered`: marks a missing entry."""

LAST = tl.constexpr(2**31 - 1)
"""Above every index."""


@triton.jit
def ordered(number):
    """An int32 per float32, in the same order: equal numbers are equal, NaN is above all."""
    # Minus zero becomes zero, as the two are equal.
    bits = (number + 0.0).to(tl.int32, bitcast=True)
    # The bits of floats order like integers once the bits of negative numbers are inverted.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(order):
    """The float32 for which `ordered` returned this int32."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_of(left, index, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr):
    """The `COUNT` largest values of `left`, largest first; ties go to the lower `index`.

    `left` holds int32 of `ordered`. The indices of values above `NONE` must differ. Returns values
    and indices, int32 ``[COUNT_PAD]`` each; entries beyond `COUNT` are undefined.
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

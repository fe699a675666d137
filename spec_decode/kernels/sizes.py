"""Sizes of launches on the host, as plain integers.

Triton's own functions of these names serve kernels, too, and take microseconds a call: half of what
attention takes to be prepared for a launch, layer by layer.
"""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    """Quotient of two positive integers, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least a positive integer."""
    return 1 << (number - 1).bit_length()

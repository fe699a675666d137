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


_TOPK_PROGRAMS = 64
"""Programs a row at most, but for the largest vocabularies: their bests are put together by one."""

_MIN_BLOCK, _MAX_BLOCK = 512, 4096
"""Tokens of a program: few, as it takes one maximum after the other of all of them."""


def topk_block(vocab_size: int) -> tuple[int, int]:
    """Tokens of a program that finds the best of a row, and its warps."""
    block = next_power_of_2(cdiv(vocab_size, _TOPK_PROGRAMS))
    block = min(max(block, _MIN_BLOCK), _MAX_BLOCK)
    return block, block // _MIN_BLOCK


def topk_merge_warps(entries: int) -> int:
    """Warps of the program that puts so many bests of a row together."""
    return 4 if entries > 512 else 1


def rank_block(candidates: int) -> tuple[int, int]:
    """Candidates that a program ranks, and with how many of all it compares them at a time."""
    most = next_power_of_2(candidates)
    return min(32, most), min(128, most)


def moved_block(width: int) -> tuple[int, int]:
    """Rows and columns of a program that moves the rows, `width` wide, of accepted paths."""
    return 8, min(1024, next_power_of_2(width))
